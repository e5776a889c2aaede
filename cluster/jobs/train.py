"""The `train` job: runs the stages that make a pocket pair and writes the report. Knows no model code."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cluster.config.jobs import TrainConfig
from cluster.io.console import Terminal, figure
from cluster.tools.training import report, stages
from cluster.tools.training.corpus import load_corpus


def run(config: TrainConfig, run_dir: Path) -> dict[str, Any]:
    """Run the chosen stages in order; return the report of the `report` stage, or the records of the others.

    Writes `target/`, `drafter/`, `prompts.jsonl`, `README.md`, `loss.png` and `report.json` into `config.out` or, by
    default, the run directory, so that the bundled pair is only replaced on request. Raises ValueError for an unknown
    stage or a setting out of range, FileNotFoundError for the missing output of an earlier stage that was not chosen.
    """
    config.check("job")
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    out = Path(config.out) if config.out else run_dir
    work = Path(config.work) if config.work else run_dir / "work"
    out.mkdir(parents=True, exist_ok=True)
    terminal = Terminal()
    corpus = load_corpus(config.seed)
    place = stages.Workplace(config, corpus, out, work)
    outcome: dict[str, Any] = {}
    if "tokenizer" in config.stages:
        with terminal.starting() as say:
            say("tokenizer: learning")
            stages.make_tokenizer(place)
    if "target" in config.stages:
        outcome["target"] = asdict(stages.make_target(place))
    if "continuations" in config.stages:
        with terminal.starting() as say:
            say("continuations: the target writes")
            outcome["continuation_tokens"] = stages.make_continuations(place)
    if "drafter" in config.stages:
        outcome["drafter"] = asdict(stages.make_drafter(place))
    if "report" in config.stages:
        with terminal.starting() as say:
            say("report: measuring the pair")
            outcome = {**report.describe_run(config, corpus, out, work), **report.measure(config, corpus, out)}
        (out / "report.json").write_text(json.dumps(outcome, indent=2) + "\n")
        report.draw_losses(work, out / "loss.png")
        report.write_readme(config, outcome, out / "README.md")
        lengths = outcome["acceptance_length"]
        terminal.table(
            "acceptance length", ["draft tokens", *map(str, lengths)], [["", *map(figure, lengths.values())]]
        )
    terminal.line(f"written to {out}")
    return outcome
