"""When a training evaluates, saves, logs and ends, on a clock that moves with its steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.io import console
from cluster.tools.training import trainer as module
from cluster.tools.training.token_stream import spread_rows
from cluster.tools.training.trainer import Recipe, StepOutcome, TrainingBudget, fit, rate_factor
from docs.measurements.pocket.batches import StreamBatches


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


class Line(torch.nn.Module):
    """One number, which every step makes smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.nn.Parameter(torch.tensor([5.0]))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_without_a_bar_has_a_line_now_and_then(tmp_path, clock, monkeypatch, capsys):
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    model = Line()

    def step_loss(step: int, progress: float) -> StepOutcome:
        clock[0] += 20.0
        return StepOutcome(model.number.sum() * 0 + 2, 7)

    budget = TrainingBudget(2.0)
    fit(model, step_loss, Recipe(log_steps=1), budget, tmp_path / "run", evaluate=lambda: {"length": 1.5})
    assert [line for line in capsys.readouterr().out.splitlines() if "loss" in line] == [
        "run 40 s loss 2.000 held-out length 1.50, 17% done",
        "run 80 s loss 2.000 held-out length 1.50, 50% done",
        "run 120 s loss 2.000 held-out length 1.50, 83% done",
    ]


def test_evaluations_saves_and_logs_come_at_their_times(tmp_path, clock, monkeypatch):
    """Fifteen steps of twenty seconds, evaluated each minute and saved every second one."""
    model, saved, modes = Line(), list[Any](), set[tuple[str, bool]]()

    def step_loss(step: int, progress: float) -> StepOutcome:
        assert progress == pytest.approx(step * 20 / 300)
        modes.add(("step", model.training))
        clock[0] += 20.0
        return StepOutcome(model.number.sum(), 7, {"extra": torch.tensor(step)})

    def evaluate() -> dict[str, float]:
        modes.add(("evaluation", model.training))
        return {"length": 2.0}

    monkeypatch.setattr(module, "save_whole", lambda state, path: saved.append((state["counts"], path)))
    recipe = Recipe(checkpoint_minutes=2.0, log_steps=5)
    record = fit(model, step_loss, recipe, TrainingBudget(5.0), tmp_path / "deep" / "run", evaluate=evaluate)
    assert modes == {("step", True), ("evaluation", False)} and not model.training
    work = tmp_path / "deep" / "run"
    evaluated = [(line["step"], line["tokens"], line["seconds"]) for line in lines_of(work / "evaluation.jsonl")]
    assert evaluated == [(step, 7 * step, 20.0 * step) for step in (0, 4, 8, 12, 15)], "after more than a minute"
    assert saved == [([step, 7 * step, 20.0 * step], work / "state.pt") for step in (6, 12, 15)], "after two minutes"
    logged = lines_of(work / "loss.jsonl")
    assert [(line["step"], line["extra"]) for line in logged] == [(1, 0), (5, 4), (10, 9), (15, 14)]
    assert record.final_loss == pytest.approx(logged[-1]["loss"]), "of the last tenth"
    assert json.loads((work / "record.json").read_text()) == {
        "steps": 15,
        "tokens": 105,
        "seconds": 300.0,
        "final_loss": record.final_loss,
    }


def test_a_new_training_leaves_no_lines_of_an_old_one_and_none_without_evaluation(tmp_path, clock):
    for name in ("loss", "evaluation"):
        (tmp_path / f"{name}.jsonl").write_text('{"step": 99}\n')
    model = Line()
    fit(model, lambda *_: StepOutcome(model.number.sum(), 1), Recipe(), TrainingBudget(60.0, 2), tmp_path)
    assert [line["step"] for line in lines_of(tmp_path / "loss.jsonl")] == [1]
    assert not (tmp_path / "evaluation.jsonl").exists()


def test_the_loss_of_a_run_is_the_mean_of_its_last_tenth(tmp_path, clock):
    model = Line()
    loss = lambda step, _: StepOutcome(0 * model.number.sum() + step, 1)  # noqa: E731
    record = fit(model, loss, Recipe(log_steps=1), TrainingBudget(60.0, 25), tmp_path)
    assert record.final_loss == pytest.approx((23 + 24) / 2)


def test_a_loss_that_is_no_number_ends_the_training(tmp_path, clock):
    model = Line()
    with pytest.raises(FloatingPointError, match="^the loss of step 1 is not finite; lower the learning rates$"):
        fit(model, lambda *_: StepOutcome(model.number.sum() * math.nan, 1), Recipe(), TrainingBudget(9.0), tmp_path)


def test_a_budget_counts_what_was_spent_before(clock):
    budget = TrainingBudget(minutes=2.0, steps=100)
    clock[0] += 30.0
    assert (budget.seconds, budget.progress(10), budget.progress(50)) == (30.0, 0.25, 0.5)
    budget.resume(60.0)
    assert (budget.seconds, budget.progress(10)) == (90.0, 0.75)


@pytest.mark.parametrize(
    ("step", "progress", "warmup", "decay", "factor"),
    [
        (0, 0.0, 0, 0.0, 1.0),
        (0, 1.0, 0, 0.0, 1.0),
        (0, 0.0, 4, 0.0, 0.25),
        (3, 0.0, 4, 0.0, 1.0),
        (9, 0.9, 0, 0.4, 0.25),
        (9, 1.5, 0, 0.4, 0.0),
        (0, 0.8, 2, 0.4, 0.5),
    ],
)
def test_the_smaller_ramp_of_the_rate_applies(step, progress, warmup, decay, factor):
    assert rate_factor(step, progress, warmup, decay) == pytest.approx(factor)


def test_the_shortest_stream_that_can_be_cut_has_two_sequences():
    assert StreamBatches(torch.arange(12), 0).draw(1, 5).shape == (1, 6)
    with pytest.raises(ValueError, match="^a stream of 11 tokens is too short for sequences of 5$"):
        StreamBatches(torch.arange(11), 0).draw(1, 5)


@pytest.mark.parametrize(
    ("num_tokens", "firsts"),
    [(0, [0]), (4, [0]), (10, [0, 15]), (15, [0, 5, 15]), (20, [0, 5, 10, 15]), (99, [0, 5, 10, 15])],
)
def test_rows_are_spread_evenly_over_the_stream(num_tokens, firsts):
    rows = spread_rows(torch.arange(21), 5, num_tokens)
    assert rows.tolist() == [list(range(first, first + 6)) for first in firsts]
