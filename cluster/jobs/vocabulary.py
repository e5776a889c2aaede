"""`job=vocabulary`: a token list for `drafter.vocabulary`, from what the target writes or from text files.

Counting the target's own output finds the tokens that a drafter has to propose (VocabTrim, arXiv 2506.22694); text
files need no engine (FR-Spec, 2502.14856). End tokens are always listed, first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from actors.drafters.corpus import read_corpus
from actors.drafters.vocabulary.token_list import count_tokens, ranked_tokens, write_token_list
from actors.tokenizer_file import tokenizer_digest
from cluster.config.jobs import VocabularyConfig
from cluster.config.schema import LaunchConfig
from cluster.engine import Engine
from cluster.io.console import Terminal, percent
from cluster.io.prompts import read_prompts
from cluster.io.text import named_files, read_eos_token_ids
from cluster.observability.report import write_json
from cluster.run_prompts import all_completed, serve_prompts
from parallel.whole_files import make_folder


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for texts or prompts that cannot be read, EngineError for a failed request."""
    job: VocabularyConfig = config.job
    terminal, target = Terminal(), Path(config.target.path)
    out = Path(job.out).expanduser() if job.out else run_dir / "vocabulary.json"
    texts = _texts_of_files(job, target, terminal) if job.files else _outputs(config, run_dir, terminal)
    counts = count_tokens(texts)
    tokens = ranked_tokens(counts, read_eos_token_ids(target), job.size)
    total = counts.total()
    make_folder(out.parent)
    write_token_list(out, tokens, counts, tokenizer_digest(target))
    covered = sum(counts[token] for token in tokens) / total if total else None
    about = {"texts": len(texts), "counted": total, "tokens": len(tokens), "covered": covered}
    write_json(
        run_dir / "vocabulary_report.json", {"job": job.name, "list": str(out), **about, "config": asdict(config)}
    )
    terminal.line(f"{len(tokens):,} tokens, {percent(covered)} of the {total:,} counted, written to {out}:")
    terminal.line(f"drafter=model drafter.vocabulary={out}")


def _texts_of_files(job: VocabularyConfig, target: Path, terminal: Terminal) -> list[Sequence[int]]:
    texts: list[Sequence[int]] = []
    with terminal.starting() as progress:
        for file in named_files(job.files):
            progress(f"reading {file.name}")
            texts += read_corpus(file, target, "job.files")
    return texts


def _outputs(config: LaunchConfig, run_dir: Path, terminal: Terminal) -> list[Sequence[int]]:
    """What the target writes after each prompt, with the drafter of the launch, which changes no token."""
    job: VocabularyConfig = config.job
    prompts = read_prompts(Path(job.prompts), job.limit, drafters=config.drafter.names_in(config.pipeline.name))
    with terminal.starting() as progress:
        engine = Engine(config, progress=progress, log_dir=run_dir / "logs")
    sampling = config.sampling_params(engine.tokenizer)
    with engine, terminal.counting("completing prompts", len(prompts)) as bar:
        run = serve_prompts(
            engine,
            prompts,
            sampling,
            speculate=True,
            concurrency=job.concurrency,
            on_finished=lambda _: bar.advance(),
        )
    return [served.token_ids for served in all_completed(run)]
