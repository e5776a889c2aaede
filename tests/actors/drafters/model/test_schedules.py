"""When rows are calibrated, how wide an unsure model drafts, and how text is read ahead: at their bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from actors.drafters.model.calibration import CalibrationSchedule
from actors.drafters.model.confidence_growth import ConfidenceGrowth
from actors.drafters.model.config import CalibrationPolicy, ModelDrafterConfig
from actors.drafters.model.prefill import prefill
from actors.drafters.model.tree_growth import Candidate, GrowingTree


@pytest.mark.parametrize(
    ("policy", "every", "due"),
    [
        (CalibrationPolicy.every, 1, [True] * 5),
        (CalibrationPolicy.every, 2, [False, True, False, True, False]),
        (CalibrationPolicy.never, 1, [False] * 5),
        (CalibrationPolicy.mismatch, 1, [True, False, True, False, True]),
    ],
)
def test_rows_are_calibrated_by_their_policy(policy, every, due):
    """Every other verdict rejects; each request is counted by itself, anew once it ended."""
    schedule = CalibrationSchedule(ModelDrafterConfig(calibration_policy=policy, calibrate_every=every))
    assert [schedule.is_due(1, rejected=i % 2 == 0) for i in range(5)] == due
    assert schedule.is_due(2, rejected=False) == (policy is CalibrationPolicy.every and every == 1)
    schedule.release(1)
    schedule.release(9)
    assert [schedule.is_due(1, rejected=i % 2 == 0) for i in range(5)] == due


@pytest.mark.parametrize(
    ("confidence", "width"),
    [(0.1, 7), (0.299, 7), (0.301, 5), (0.599, 5), (0.601, 3), (0.799, 3), (0.801, 1), (1.0, 1)],
)
def test_siblings_by_the_probability_of_the_likeliest(confidence, width):
    growth, tree = ConfidenceGrowth(3), GrowingTree(0)
    candidates = [Candidate(0, 10 + i, math.log(confidence) - i) for i in range(7)]
    assert growth.extend(tree, candidates, 30) == [1], "only the likeliest is fed"
    assert tree.token_ids == [0, *range(10, 10 + width)] and growth.max_fed(30) == 2 and growth.max_fed(2) == 1
    assert growth.extend(tree, [], 30) == []


@pytest.mark.parametrize(("budget", "width"), [(9, 7), (8, 6), (4, 2), (3, 1)])
def test_the_chain_has_room_before_siblings_have(budget, width):
    growth, tree = ConfidenceGrowth(3), GrowingTree(0)
    growth.extend(tree, [Candidate(0, i, -3.0 - i) for i in range(7)], budget)
    assert len(tree.token_ids) == 1 + width


class Runner:
    """Caches what it is fed while there is room."""

    def __init__(self, *, cached=0, room=99, max_positions=99):
        self.longest_text = max_positions
        self.cached, self.room, self.passes = cached, room, []

    def cached_len(self, seq_id):
        return self.cached

    def can_reserve(self, num_rows):
        return num_rows <= self.room

    def forward(self, spans, token_ids):
        (span,) = spans
        assert (span.num_tokens, span.num_logits) == (len(token_ids), 0)
        self.passes.append(list(token_ids))

    def commit(self, seq_id, keep):
        self.cached += len(keep)
        self.room -= len(keep)


@pytest.mark.parametrize(
    ("options", "leave", "chunk", "passes"),
    [
        ({}, 1, 4, [[0, 1, 2, 3], [4, 5, 6, 7], [8]]),
        ({}, 0, 5, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
        ({"cached": 7}, 1, 4, [[7, 8]]),
        ({"cached": 9}, 1, 4, []),
        ({"room": 5}, 1, 4, [[0, 1, 2, 3]]),
        ({"room": 8}, 1, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"max_positions": 6}, 1, 4, [[0, 1, 2, 3], [4, 5]]),
    ],
)
def test_text_is_read_in_chunks_as_far_as_there_is_room(options, leave, chunk, passes):
    runner: Any = Runner(**options)
    prefill(runner, 1, range(10), leave=leave, chunk=chunk)
    assert runner.passes == passes
