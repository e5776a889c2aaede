"""The `train` job: trains a drafter by a recipe, or runs the stages that make a pocket pair, and writes the report.

Knows no model code.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cluster.config.jobs import TrainConfig
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal, figure
from cluster.observability.report import write_json
from cluster.tools.training import report, stages
from cluster.tools.training.corpus import load_corpus
from cluster.tools.training.trainer import Ranks


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Train what `job.recipe` names. ValueError, one line, for a setting or text that cannot be used."""
    job: TrainConfig = config.job
    if job.makes_pair:
        make_pair(job, run_dir)
    else:
        make_drafter(config, run_dir)


def make_drafter(launched: LaunchConfig, run_dir: Path) -> dict[str, Any]:
    """Train one drafter for `target.path`; write `drafter/`, `curves.png` and `report.json`, and return the report.

    Raises ValueError, one line, for what cannot be used.
    """
    from cluster.tools.training.speculators import run as training

    config: TrainConfig = launched.job
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    out = Path(config.out or run_dir).absolute()
    work = Path(config.work or run_dir / "work").absolute()
    out.mkdir(parents=True, exist_ok=True)
    course = training.Course(config, launched.target.path, str(out), str(work))
    course.options()
    terminal = Terminal()
    with terminal.starting() as say:
        texts = training.prepare(course, say)
    if config.ranks > 1:
        from cluster.tools.training.ray_ranks import train_on_ranks

        outcome = train_on_ranks(launched, course, texts)
    else:
        outcome = training.train_rank(course, texts, Ranks())
    training.draw_curves(course.folder, out / "curves.png")
    write_json(out / "report.json", outcome)
    terminal.table("held-out acceptance", *_acceptance_table(config, outcome))
    terminal.line(f"written to {out}")
    return outcome


def make_pair(config: TrainConfig, run_dir: Path) -> dict[str, Any]:
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
        write_json(out / "report.json", outcome)
        report.draw_losses(work, out / "loss.png")
        report.write_readme(config, outcome, out / "README.md")
        lengths = outcome["acceptance_length"]
        terminal.table(
            "acceptance length", ["draft tokens", *map(str, lengths)], [["", *map(figure, lengths.values())]]
        )
    terminal.line(f"written to {out}")
    return outcome


def _acceptance_table(config: TrainConfig, outcome: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: expected tokens per round and acceptance by depth, by temperature, before and after."""
    measured = {"before": outcome["held_out_before"], "after": outcome["held_out"]}
    depths = [name for name in measured["after"] if name.startswith("accept_") and "_at_" not in name]
    rows = []
    for temperature in config.temperatures:
        suffix = f"_at_{temperature:g}" if temperature else ""
        for when, values in measured.items():
            cells = [values[f"length{suffix}"], *(values[f"{depth}{suffix}"] for depth in depths)]
            rows.append([f"T={temperature:g} {when}", *map(figure, cells)])
    return ["", "tokens per round", *(f"depth {depth.removeprefix('accept_')}" for depth in depths)], rows
