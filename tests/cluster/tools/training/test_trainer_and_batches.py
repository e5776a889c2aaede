"""Budget, learning rate, and the cutting of batches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from cluster.tools.training.batches import StreamBatches
from cluster.tools.training.trainer import TrainingBudget, rate_factor


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


def test_too_short_a_stream_is_an_error():
    with pytest.raises(ValueError, match="too short"):
        StreamBatches(torch.arange(10), seed=0).draw(1, 16)
