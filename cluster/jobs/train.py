"""The `train` job: trains a drafter by a recipe and writes the report.

Knows no model code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cluster.config.jobs import SPECDEC, TrainConfig
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal, figure
from cluster.observability.report import write_json
from cluster.tools.training.trainer import Ranks
from parallel.whole_files import make_folder


def run(launched: LaunchConfig, run_dir: Path) -> dict[str, Any]:
    """Train one drafter for `target.path`; write `drafter/`, `curves.png` and `report.json`, and return the report.

    Raises ValueError, one line, for what cannot be used.
    """
    from cluster.tools.training.speculators import run as training

    config: TrainConfig = launched.job
    if config.ranks == 1:  # several may run elsewhere
        _check_device(config.device)
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    out = Path(config.out or run_dir).expanduser().absolute()
    work = Path(config.work or run_dir / "work").expanduser().absolute()
    make_folder(out)
    terminal = Terminal()
    if config.recipe == SPECDEC:  # whose text is another, and whose loop has one rank
        from cluster.tools.training import specdec

        with terminal.starting() as say:
            outcome = specdec.train(config, Path(launched.target.path), out, work, say)
        folder, table = work / specdec.NAME, _acceptance_table(outcome, [0.0], most_depths=8)
    else:
        course = training.Course(config, launched.target.path, str(out), str(work))
        course.options()
        with terminal.starting() as say:
            texts = training.prepare(course, say)
        if config.ranks > 1:
            from cluster.tools.training.ray_ranks import train_on_ranks

            outcome = train_on_ranks(launched, course, texts)
        else:
            outcome = training.train_rank(course, texts, Ranks())
        folder, table = course.folder, _acceptance_table(outcome, config.temperatures)
    training.draw_curves(folder, out / "curves.png")
    write_json(out / "report.json", outcome)
    terminal.table("held-out acceptance", *table)
    terminal.line(f"written to {out}")
    return outcome


def _check_device(device: str) -> None:
    """Raise ValueError, one line, unless PyTorch has this device here."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # a build without the device asserts
        raise ValueError(f"job.device={device}: PyTorch has no such device here; use cpu") from error


def _acceptance_table(
    outcome: dict[str, Any], temperatures: Sequence[float], most_depths: int | None = None
) -> tuple[list[str], list[list[str]]]:
    """Header and rows: expected tokens per round and acceptance by depth, by temperature, before and after."""
    measured = {"before": outcome["held_out_before"], "after": outcome["held_out"]}
    depths = [name for name in measured["after"] if name.startswith("accept_") and "_at_" not in name][:most_depths]
    rows = []
    for temperature in temperatures:
        suffix = f"_at_{temperature:g}" if temperature else ""
        for when, values in measured.items():
            cells = [values[f"length{suffix}"], *(values[f"{depth}{suffix}"] for depth in depths)]
            rows.append([f"T={temperature:g} {when}", *map(figure, cells)])
    return ["", "tokens per round", *(f"depth {depth.removeprefix('accept_')}" for depth in depths)], rows
