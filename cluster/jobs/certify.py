"""`job=certify`: show, for this target, drafter and settings, that speculation leaves the output unchanged.

Files: `certificate.json` with every figure, `certificate.md` as a page to read. A certificate that fails ends the job
with an error, so that scripts get a non-zero exit code.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from cluster.config.jobs import CertifyConfig
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine
from cluster.io.console import Terminal
from cluster.io.prompts import read_prompts
from cluster.observability.report import versions, write_json
from cluster.tools.certify.certificate import Certificate
from cluster.tools.certify.identity import complete, settings
from cluster.tools.certify.procedure import check_outputs, describe_subject, num_steps
from parallel.whole_files import write_text


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for prompts that cannot be read, EngineError for a failed request, RuntimeError for a check."""
    job: CertifyConfig = config.job
    config = _drafting(config)
    prompts = read_prompts(Path(job.prompts), job.limit)
    terminal = Terminal()
    with terminal.starting() as progress:
        engine = Engine(config, progress=progress, log_dir=run_dir / "logs")
    params = settings(config.sampling_params(engine.tokenizer), job.temperatures, job.seeds)
    with terminal.counting("completing on both sides", num_steps(config, params, len(prompts))) as bar:
        with engine:
            outputs = [
                output
                for sampling in params
                for output in complete(engine, prompts, sampling, job.concurrency, bar.advance)
            ]
        checks, notes = check_outputs(config, outputs, params, bar)
    certificate = Certificate(describe_subject(config), checks, notes)
    write_json(
        run_dir / "certificate.json", {**certificate.to_json(), "versions": versions(), "config": asdict(config)}
    )
    page = run_dir / "certificate.md"
    write_text(page, certificate.to_markdown())
    terminal.table(
        f"Certificate: {certificate.verdict}", ("check", "", "findings"), [check.row for check in certificate.checks]
    )
    for note in notes:
        terminal.line(f"note: {note}")
    terminal.line(f"written to {run_dir}")
    if certificate.failed:
        raise RuntimeError(f"certificate: FAILED at {', '.join(certificate.failed)}; see {page}")


def _drafting(config: LaunchConfig) -> LaunchConfig:
    """The configuration that is certified: with `job.always_draft`, no round falls back to plain decoding."""
    least = max(int(config.job.always_draft), config.pipeline.min_draft_tokens)
    return replace(config, pipeline=replace(config.pipeline, min_draft_tokens=least))
