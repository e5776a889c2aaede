"""`job=certify`: prove, for this target, drafter and settings, that speculation leaves the output unchanged.

Files: `certificate.json` with every figure, `certificate.md` as a page to read. A certificate that fails ends the job
with an error, so that scripts notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import DrafterConfig
from actors.options import SamplingConfig, VerifyRule
from actors.protocol.messages import SamplingParams
from actors.sampling.logits import is_greedy
from cluster.config.schema import CertifyConfig, LaunchConfig
from cluster.engine import Engine
from cluster.io.console import Bar, Terminal
from cluster.io.prompts import Prompt, read_prompts
from cluster.io.text import load_tokenizer, read_eos_token_ids
from cluster.observability.report import versions, write_json
from cluster.tools.certify.checks import (
    Check,
    check_distribution,
    check_identity,
    check_rounding,
    draw_fits,
    kinds_of,
    remarks,
    scheme_of,
)
from cluster.tools.certify.draws import CHUNK
from cluster.tools.certify.exact import check_exactness
from cluster.tools.certify.identity import Output, complete, settings
from cluster.tools.certify.levels import check_levels
from cluster.tools.certify.reader import Reader
from cluster.tools.certify.rounding import Scorer, fit_ranks
from cluster.tools.certify.summary import check_rows, page, verdict


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for prompts that cannot be read, EngineError if a request failed, RuntimeError if it fails."""
    job: CertifyConfig = config.job
    prompts = read_prompts(Path(job.prompts), job.limit)
    terminal = Terminal()
    with terminal.starting() as progress:
        engine = Engine(config, progress=progress, log_dir=run_dir / "logs")
    params = settings(config.sampling_params(engine.tokenizer), job.temperatures, job.seeds)
    with terminal.counting("completing on both sides", _num_steps(config, params, len(prompts))) as bar:
        with engine:
            outputs = _complete(engine, prompts, params, bar)
        checks, notes = _check(config, outputs, params, bar)
    certificate = {
        "passed": all(check["passed"] for check in checks),
        "subject": _subject(config),
        "checks": checks,
        "notes": notes,
        "versions": versions(),
        "config": asdict(config),
    }
    write_json(run_dir / "certificate.json", certificate)
    (run_dir / "certificate.md").write_text(page(certificate), encoding="utf-8")
    terminal.table(f"Certificate: {verdict(certificate)}", ("check", "", "findings"), check_rows(checks))
    for note in notes:
        terminal.line(f"note: {note}")
    terminal.line(f"written to {run_dir}")
    failed = [str(check["name"]) for check in checks if not check["passed"]]
    if failed:
        raise RuntimeError(f"certificate: FAILED at {', '.join(failed)}; see {run_dir / 'certificate.md'}")


def _complete(engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams], bar: Bar) -> list[Output]:
    concurrency = engine.config.job.concurrency
    return [output for one in params for output in complete(engine, prompts, one, concurrency, bar.advance)]


def _check(
    config: LaunchConfig, outputs: list[Output], params: list[SamplingParams], bar: Bar
) -> tuple[list[Check], list[str]]:
    """All checks of what was completed, and of the rule; the engine is closed by now."""
    job: CertifyConfig = config.job
    rule, checkpoint = config.verify.rule, Path(config.target.path)
    eos_token_ids, tokenizer = read_eos_token_ids(checkpoint), load_tokenizer(checkpoint)
    longest = max(len(output.prompt_ids) + max(len(output.plain), len(output.speculative)) for output in outputs)
    num_slots = longest + config.verify.law_size + 1
    target = Reader(config.target.path, config.target.device, config.target.dtype, num_slots, config.target.stretch)
    bar.say("rounding")
    scorer = Scorer(target, rule, eos_token_ids)
    first = [output for output in outputs if output.sampling == params[0]]
    rounding = check_rounding(scorer.movement(first), outputs, scorer, target)
    bar.advance()
    bar.say("enumerating")
    exact = [check_exactness(rule, config.drafter.sampling_kinds(rule, config.pipeline.name))]
    if isinstance(config.drafter, CascadeDrafterConfig) and rule is not VerifyRule.coupled:
        exact.append(check_levels(rule, config.drafter, *config.drafter.first_kinds(rule, config.pipeline.name)))
    bar.advance()
    checks = [check_identity(outputs, rule, scorer, tokenizer, rounding["tie_below"]), *exact]
    sampled = _tempered(params)
    draft = _draft_reader(config, num_slots) if sampled else None
    if sampled:
        bar.say("drawing")
        texts = list(dict.fromkeys(output.prompt_ids for output in outputs))[: job.contexts]
        kinds = kinds_of(config.verify, config.drafter, config.drafter.sampling_kinds(rule, config.pipeline.name))
        schemes = [scheme_of(config.verify, config.drafter, kind) for kind in kinds]
        fits = draw_fits(texts, sampled, schemes, eos_token_ids, (target, draft), job.draws, lambda n: bar.advance())
        checks.append(check_distribution([*fits, fit_ranks(scorer, outputs)], job.significance, job.power))
    return [*checks, rounding], remarks(outputs, rule, draft or target, target.vocab_size)


def _tempered(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """One setting for every temperature above zero."""
    return list({one.temperature: one for one in params if not is_greedy(one)}.values())


def _draft_reader(config: LaunchConfig, num_slots: int) -> Reader | None:
    """Of the model whose tokens the target sees: in a cascade, that of the last level."""
    drafter = config.drafter
    drafter = getattr(drafter, "levels", (drafter,))[-1]
    path = getattr(drafter, "path", None)
    return Reader(path, drafter.device, drafter.dtype, num_slots) if path else None


def _num_steps(config: LaunchConfig, params: Sequence[SamplingParams], num_prompts: int) -> int:
    job: CertifyConfig = config.job
    drawn = config.drafter.sampling_kinds(config.verify.rule, config.pipeline.name)
    kinds = len(kinds_of(config.verify, config.drafter, drawn))
    chunks = -(-job.draws // CHUNK) * min(job.contexts, num_prompts) * len(_tempered(params)) * kinds
    return 2 * num_prompts * len(params) + 2 + chunks


def _subject(config: LaunchConfig) -> dict[str, object]:
    """What the certificate is about, in a few lines."""
    job, usual = config.job, SamplingConfig()
    own = {"temperature", "seed", "max_tokens"}
    changed = {
        item.name: getattr(config.sampling, item.name)
        for item in fields(usual)
        if item.name not in own and getattr(config.sampling, item.name) != getattr(usual, item.name)
    }
    return {
        "target": f"{config.target.path}, tp={config.target.tp}",
        "drafter": _drafter(config.drafter),
        "rule": f"{config.verify.rule}, law_size={config.verify.law_size}",
        "pipeline": str(config.pipeline.name),
        "temperatures": ", ".join(f"{temperature:g}" for temperature in job.temperatures),
        "seeds": ", ".join(str(seed) for seed in job.seeds),
        "sampling": ", ".join(f"{name}={value}" for name, value in changed.items()) or "no further processors",
        "prompts": f"{job.prompts}, {config.sampling.max_tokens} tokens each at most",
    }


def _drafter(drafter: DrafterConfig) -> str:
    """Family, model and shape; of a cascade those of every level, the cheapest first."""
    if not isinstance(drafter, CascadeDrafterConfig):
        parts = [drafter.name, getattr(drafter, "path", ""), str(getattr(drafter, "strategy", ""))]
        length = getattr(drafter, "num_draft_tokens", 0)
        return " ".join(part for part in parts if part) + f", {length} draft tokens" * bool(length)
    levels = "; ".join(f"{level}: {_drafter(one)}" for level, one in enumerate(drafter.levels))
    tails = "/".join(str(tail) for tail in drafter.tails) or "none"
    return (
        f"cascade of {len(drafter.levels)} levels ({levels}), tails {tails}, merge {drafter.merge}, "
        f"lengths {drafter.lengths}, {drafter.placement}, {drafter.num_draft_tokens} draft tokens"
    )
