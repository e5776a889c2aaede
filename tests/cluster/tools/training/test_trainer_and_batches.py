"""Budget, learning rate, and the cutting of batches."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.tools.training.models import drafter_config, initialised
from cluster.tools.training.trainer import Ranks, Recipe, StepOutcome, TrainingBudget, fit, optimizers, rate_factor
from docs.measurements.pocket.batches import DistillationSet, StreamBatches
from parallel.training.muon import Muon


def test_rate_rises_holds_and_falls_to_zero():
    factors = [rate_factor(step, step / 100, warmup_steps=10, decay_fraction=0.5) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:51] == [1.0] * 41
    assert factors[75] == pytest.approx(0.5)
    assert factors[100] == 0.0
    assert all(earlier >= later for earlier, later in pairwise(factors[50:]))


def test_rate_decays_even_when_time_runs_out_during_warmup():
    assert rate_factor(step=3, progress=0.99, warmup_steps=1000, decay_fraction=0.5) < 0.02


def test_nearer_limit_decides():
    assert TrainingBudget(minutes=1000, steps=10).progress(10) == 1.0
    assert TrainingBudget(minutes=1000).progress(10) < 0.01
    assert TrainingBudget(minutes=1e-9, steps=10).progress(0) > 1.0


@pytest.mark.parametrize("limits", [{"minutes": 0}, {"minutes": -1}, {"minutes": 1, "steps": -1}])
def test_budget_without_a_positive_limit_is_an_error(limits: dict):
    with pytest.raises(ValueError):
        TrainingBudget(**limits)


def test_batches_are_windows_of_the_stream_and_repeat_with_the_seed():
    stream = torch.arange(1000)
    batches, again, other = StreamBatches(stream, 0), StreamBatches(stream, 0), StreamBatches(stream, 1)
    first = batches.draw(4, 16)
    assert first.shape == (4, 17)
    assert (first.diff(dim=1) == 1).all()
    assert torch.equal(first, again.draw(4, 16))
    assert not torch.equal(first, other.draw(4, 16))


def test_an_epoch_visits_every_window_once():
    batches = StreamBatches(torch.arange(1000), seed=0)
    starts = batches.draw(60, 16)[:, 0]
    assert len(set(starts.tolist())) == 60
    assert len(set((starts % 16).tolist())) == 1


def test_batches_go_on_past_the_end_and_at_another_length():
    batches = StreamBatches(torch.arange(100), seed=0)
    assert batches.draw(50, 10).shape == (50, 11)
    assert batches.draw(3, 20).shape == (3, 21)
    longer = StreamBatches(torch.arange(1000), seed=0)
    longer.draw(3, 10)
    starts = longer.draw(40, 20)[:, 0]
    assert len(set(starts.tolist())) == 40 and len(set((starts % 20).tolist())) == 1, "windows of the length before"


def test_too_short_a_stream_is_an_error():
    with pytest.raises(ValueError, match="too short"):
        StreamBatches(torch.arange(10), seed=0).draw(1, 16)


class Probe(torch.nn.Module):
    """A matrix, a table and a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(4, 4)
        self.table = torch.nn.Embedding(8, 4)
        self.fixed = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)


def test_matrices_are_muons_and_tables_and_vectors_adamws():
    probe = Probe()
    muon, adamw = optimizers(probe, Recipe(matrix_learning_rate=0.1, other_learning_rate=0.2))
    assert isinstance(muon, Muon) and isinstance(adamw, torch.optim.AdamW)
    assert [id(one) for one in muon.param_groups[0]["params"]] == [id(probe.inner.weight)]
    assert {id(one) for one in adamw.param_groups[0]["params"]} == {id(probe.inner.bias), id(probe.table.weight)}
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.1, 0.2)
    assert adamw.param_groups[0]["weight_decay"] == 0.0


def test_steps_follow_the_schedule_and_gradients_are_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the optimizers are given at every step: rates of the schedule, and gradients of norm 0.5 at most."""
    probe, rates, norms = Probe(), [], []

    def stepping(self: Muon, *_: Any) -> None:  # the first of the two: all gradients are there
        rates.append(self.param_groups[0]["lr"])
        norms.append(torch.cat([one.grad.flatten() for one in probe.parameters() if one.grad is not None]).norm())

    monkeypatch.setattr(Muon, "step", stepping)

    def loss(step: int, _: float) -> StepOutcome:
        return StepOutcome(10**step * (probe.inner.weight.sum() + probe.table.weight.sum() + probe.inner.bias.sum()), 7)

    recipe = Recipe(matrix_learning_rate=1.0, warmup_steps=2, decay_fraction=0.5, clip_norm=0.5, log_steps=1)
    record = fit(probe, loss, recipe, TrainingBudget(60, 4), tmp_path)
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5])
    assert all(norm == pytest.approx(0.5, rel=1e-3) for norm in norms)
    assert (record.steps, record.tokens) == (4, 28)
    lines = [json.loads(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [7, 14, 21, 28]


def test_tokens_of_all_ranks_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Ranks, "agreed", lambda self, progress: progress)  # alone, as if the other rank said the same
    probe = Probe()
    loss = lambda *_: StepOutcome(probe.inner.weight.sum(), 7)  # noqa: E731
    assert fit(probe, loss, Recipe(), TrainingBudget(60, 2), tmp_path, ranks=Ranks(0, 3)).tokens == 2 * 3 * 7


def test_minutes_that_are_over_before_the_first_step_are_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="before the first step"):
        fit(Probe(), lambda *_: pytest.fail("a step"), Recipe(), TrainingBudget(1e-9), tmp_path)


def test_a_resumed_draw_goes_on_in_the_epoch():
    """Rows of distillation and windows of a stream: the rest of an epoch comes next, then the next one's order."""
    teacher = initialised(drafter_config(64), 0, "cpu")
    rows = torch.arange(6 * 4).view(6, 4)
    for make, draw in (
        (lambda: DistillationSet(teacher, rows, 0), lambda one: one.draw(2)[0]),
        (lambda: StreamBatches(torch.arange(100), 0), lambda one: one.draw(2, 8)),
    ):
        whole, killed, resumed = make(), make(), make()
        expected = [draw(whole).tolist() for _ in range(9)]
        found = [draw(killed).tolist() for _ in range(4)]
        resumed.load_state_dict(killed.state_dict())
        assert found + [draw(resumed).tolist() for _ in range(5)] == expected


def test_an_epoch_of_distillation_has_every_row_once_with_its_own_states():
    teacher = initialised(drafter_config(64), 0, "cpu")
    rows = torch.randint(64, (6, 4), generator=torch.Generator().manual_seed(0))
    drawn = DistillationSet(teacher, rows, 0)
    for _ in range(2):
        batches = [drawn.draw(3) for _ in range(2)]
        tokens, hidden = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert sorted(tokens.tolist()) == sorted(rows.tolist())
        with torch.no_grad():
            expected = teacher.model(tokens).last_hidden_state
        assert (hidden.float() - expected).abs().max() < 0.05 * expected.abs().max()
