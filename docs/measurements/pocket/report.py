"""Measured quality of a finished pair, as numbers, a picture and a README. Trains nothing."""

from __future__ import annotations

import json
import math
import os
import platform
import textwrap
from pathlib import Path
from typing import Any

import torch

from cluster.io.pictures import picture
from cluster.tools.training.corpus import HELD_OUT, TEST_MEGABYTES, Corpus
from cluster.tools.training.token_stream import pack, spread_rows
from docs.measurements.pocket.config import RECIPE, SHORT_FRACTION, PairConfig
from docs.measurements.pocket.evaluation import acceptance_length, agreement_rate, greedy_matches, mean_loss, overlap
from docs.measurements.pocket.models import load_model, load_tokenizer
from parallel.whole_files import write_text

TEMPLATE = Path(__file__).with_name("readme.template")
MAX_DRAFT_TOKENS = 8
"""Acceptance length is reported for 1 to this many draft tokens per round."""
DRAFT_DEPTH = 5
"""Draft tokens per round of the acceptance length named first."""
START = 32
"""Tokens at the start of a continuation, measured apart because small models soon repeat themselves when greedy."""


def measure(config: PairConfig, corpus: Corpus, out: Path) -> dict[str, Any]:
    """Measure the pair in `out` on held-out text, in float32 from the written weights; losses in nats per token.

    FileNotFoundError without a model or the prompts.
    """
    tokenizer = load_tokenizer(out / "target")
    target, drafter = (load_model(out / role, config.device) for role in ("target", "drafter"))
    rows = spread_rows(pack(tokenizer, corpus.held_out), config.sequence_length, config.held_out_tokens)
    lines = (out / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    matches = [greedy_matches(target, drafter, prompt, config.num_prompt_tokens) for prompt in prompts]
    losses = {"target": mean_loss(target, rows), "drafter": mean_loss(drafter, rows)}
    depths = range(1, MAX_DRAFT_TOKENS + 1)
    return {
        "held_out_loss": losses,
        "held_out_perplexity": {role: math.exp(loss) for role, loss in losses.items()},
        "held_out_tokens": rows.shape[0] * (rows.shape[1] - 1),
        "agreement_on_held_out_text": agreement_rate(target, drafter, rows),
        "agreement_on_continuations": sum(map(sum, matches)) / sum(map(len, matches)),
        "acceptance_rate_when_sampling": overlap(target, drafter, rows),
        "acceptance_length": {depth: acceptance_length(matches, depth) for depth in depths},
        "acceptance_length_at_start": acceptance_length([match[:START] for match in matches], DRAFT_DEPTH),
        "num_prompts": len(prompts),
        "parameters": {"target": target.num_parameters(), "drafter": drafter.num_parameters()},
    }


def describe_run(config: PairConfig, corpus: Corpus, out: Path, work: Path) -> dict[str, Any]:
    """Return where the pair came from: corpus, seed, versions, and what each training run recorded in `work`."""
    tokenizer = load_tokenizer(out / "target")
    records = {}
    for role in ("target", "drafter"):
        path = work / role / "record.json"
        if path.exists():
            records[role] = json.loads(path.read_text())
    return {
        "seed": config.seed,
        "corpus_sha256": corpus.fingerprint(),
        "corpus_files": len(corpus.training),
        "corpus_megabytes": sum(len(source.text.encode()) for source in corpus.training) / 1e6,
        "corpus_tokens": len(pack(tokenizer, corpus.training)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "training": records,
    }


def draw_losses(work: Path, path: Path) -> None:
    """Draw the loss curves of both training runs into a PNG; runs without a log are left out."""
    captions = {"target": "cross entropy", "drafter": "KL from target"}
    with picture(path, 8, 3, columns=2) as (plots,):
        for plot, (role, caption) in zip(plots, captions.items(), strict=True):
            log = work / role / "loss.jsonl"
            lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            plot.plot([line["tokens"] / 1e6 for line in lines], [line["loss"] for line in lines])
            plot.set(title=role, xlabel="million tokens", ylabel=f"{caption}, nats/token", ylim=(0, None))
            plot.grid(axis="y")


def _row(role: str, parameters: int, record: dict[str, Any]) -> str:
    speed = record["tokens"] / record["seconds"]
    spent = f"{record['steps']} | {record['tokens'] / 1e6:.1f} M | {record['seconds'] / 60:.0f} min | {speed:.0f}"
    return f"| {role} | {parameters / 1e6:.1f} M | {spent} | {record['final_loss']:.3f} |"


def write_readme(config: PairConfig, report: dict[str, Any], path: Path) -> None:
    """Fill `readme.template` with the numbers of `measure` and `describe_run`."""
    lengths = report["acceptance_length"]
    runs = "\n".join(_row(role, report["parameters"][role], record) for role, record in report["training"].items())
    quality = "\n".join(
        f"| {role} | {loss:.3f} | {report['held_out_perplexity'][role]:.1f} |"
        for role, loss in report["held_out_loss"].items()
    )
    text = TEMPLATE.read_text(encoding="utf-8").format(
        config=config,
        report=report,
        recipe=RECIPE,
        quality=quality,
        runs=runs,
        depths=" | ".join(map(str, lengths)),
        rules="---|" * len(lengths),
        values=" | ".join(f"{length:.2f}" for length in lengths.values()),
        length=lengths[DRAFT_DEPTH],
        draft_depth=DRAFT_DEPTH,
        start=START,
        held_out=textwrap.fill(", ".join(f"`{name}`" for name in HELD_OUT), 116).replace("\n", "\n  "),
        test_megabytes=TEST_MEGABYTES,
        million_corpus_tokens=report["corpus_tokens"] / 1e6,
        million_distillation_tokens=config.distillation_tokens / 1e6,
        half_length=config.sequence_length // 2,
        short_fraction=SHORT_FRACTION,
    )
    write_text(path, text)
