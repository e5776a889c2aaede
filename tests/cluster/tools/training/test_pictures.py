"""The pictures of trainings: every line is a series of a log, over millions of tokens, with its name and unit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from cluster.tools.training.speculators.run import draw_curves
from docs.measurements.pocket.report import draw_losses


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those of the figures that are saved."""
    saved: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda page, *a, **options: saved.extend(page.axes) or save(page, *a, **options)
    )
    return saved


def write_log(path: Path, *lines: dict[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def series(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


@pytest.mark.extended
def test_losses_of_a_pair_are_drawn_for_each_model_that_was_trained(tmp_path, panels):
    lines = {"tokens": 1_000_000, "loss": 3.0, "step": 1}, {"tokens": 2_500_000, "loss": 2.0, "step": 2}
    write_log(tmp_path / "target" / "loss.jsonl", *lines)
    draw_losses(tmp_path, tmp_path / "loss.png")
    target, drafter = panels
    assert list(series(target).values()) == [([1.0, 2.5], [3.0, 2.0])] and list(series(drafter).values()) == [([], [])]
    titles = [(axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel(), axes.get_ylim()[0]) for axes in panels]
    assert titles == [
        ("target", "million tokens", "cross entropy, nats/token", 0),
        ("drafter", "million tokens", "KL from target, nats/token", 0),
    ]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.extended
def test_curves_of_a_recipe_are_drawn_by_what_they_measure(tmp_path, panels):
    write_log(tmp_path / "loss.jsonl", {"tokens": 500_000, "loss": 4.0}, {"tokens": 1_000_000, "loss": 3.0})
    measured = {"loss": 3.5, "loss_at_0.8": 3.75, "accept_1": 0.5, "accept_2": 0.25, "accept_1_at_0.8": 0.4}
    first = {"tokens": 0, "seconds": 1.0, **measured, "length": 1.5, "length_at_0.8": 1.25, "agreement": 0.1}
    write_log(tmp_path / "evaluation.jsonl", first, {**first, "tokens": 2_000_000, "accept_2": 0.5, "length": 2.5})
    draw_curves(tmp_path, tmp_path / "curves.png")
    loss, by_depth, length = panels
    at = [0.0, 2.0]
    assert series(loss) == {
        "training": ([0.5, 1.0], [4.0, 3.0]),
        "held out": (at, [3.5, 3.5]),
        "held out at 0.8": (at, [3.75, 3.75]),
    }
    assert series(by_depth) == {"1": (at, [0.5, 0.5]), "2": (at, [0.25, 0.5])}
    assert series(length) == {"length": (at, [1.5, 2.5]), "length at 0.8": (at, [1.25, 1.25])}
    titles = [(axes.get_title("left"), axes.get_xlabel()) for axes in panels]
    assert titles == [
        ("loss", "million tokens"),
        ("greedy acceptance by depth", "million tokens"),
        ("tokens per round", "million tokens"),
    ]
    for axes in panels:
        assert [text.get_text() for text in axes.get_legend().get_texts()] == list(series(axes))
        assert axes.yaxis.get_gridlines()[0].get_visible()
