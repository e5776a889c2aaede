"""Tests of whose tokens were accepted: counts by the level that drafted them, and what the control of lengths learns of
them."""

from __future__ import annotations

from typing import Any

import pytest

from actors.drafters.cascade.draft_lengths import TARGET, PassedLengths
from actors.drafters.cascade.level_stats import LevelStatsRecorder
from actors.drafters.cascade.request_state import RequestState
from actors.drafters.interface import Context
from actors.protocol.messages import LevelWork, Proposal, SamplingParams, TokenTree
from actors.verification.verifier import VerifyInput

PARAMS = SamplingParams()


class Control:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def record_acceptance(self, *counts):
        self.log.append(("acceptance", *counts))

    def record_draft(self, *draft):
        self.log.append(("draft", *draft))

    def record_commit(self, *commit):
        self.log.append(("commit", *commit))


@pytest.fixture
def recorder() -> Any:
    control: Any = Control()
    return LevelStatsRecorder("2-large", 2, "1-small", control)


def reviewed(parts=()) -> VerifyInput:
    tree = TokenTree.chain(6, [10, 11, 12, 13, 14])
    return VerifyInput(7, [5, 6], 1, PARAMS, 1, Proposal(7, 0, 2, 0, tree, parts=parts))


def test_a_review_counts_the_parts_up_to_the_first_rejected_token(recorder):
    parts = (("0-lookup", 2), ("1-small", 2), ("0-lookup", 1))
    recorder.record_review(reviewed(parts), 1, 6, (1, 2, 3))
    assert recorder.flush(()) == (
        LevelWork("0-lookup", 0, 0.0, 1, 2, 2),
        LevelWork("1-small", 0, 0.0, 1, 2, 1),
    ), "the last part was not verified"
    assert recorder.control.log == [
        ("acceptance", 1, 2, 6, 3),
        ("draft", 7, 2, 1, 6, reviewed().tree),
    ], "of what was ordered, though less came"


def test_a_proposal_without_parts_is_the_child_s(recorder):
    recorder.record_review(reviewed(), 0, 5, (1, 2, 3, 4, 5))
    assert recorder.flush(()) == (LevelWork("1-small", 0, 0.0, 1, 5, 5),)


@pytest.mark.parametrize(("source", "num_ordered"), [(None, 4), (1, 0)])
def test_where_nothing_was_ordered_nothing_is_learnt(recorder, source, num_ordered):
    recorder.record_review(reviewed(), source, num_ordered, (1,))
    assert recorder.control.log == []
    alone = VerifyInput(7, [5, 6], 1, PARAMS, 1)
    recorder.record_review(alone, 1, 4, ())
    assert recorder.control.log == [("acceptance", 1, 2, 4, 0), ("draft", 7, 2, 1, 4, alone.tree)]
    assert recorder.flush(()) == (LevelWork("1-small", 0, 0.0, 1, 5, 1),), "an order that brought nothing is no draft"


def offered(own, tail, merged, ordered) -> RequestState:
    state = RequestState(Context(7, 0, [5, 6], 1, PARAMS), [5, 6])
    state.num_offered, state.num_tail, state.num_merged, state.num_ordered = own, tail, merged, ordered
    state.parts = (("2-large", own), ("1-small", tail)) if own else (("1-small", tail),)
    return state


@pytest.mark.parametrize(("path", "own_kept"), [((), 0), ((1, 2), 2), ((1, 2, 3, 4), 3)])
def test_the_target_s_verdict_is_on_the_level_s_own_tokens(recorder, path, own_kept):
    state = offered(own=3, tail=2, merged=0, ordered=4)
    recorder.record_verdict(state, 1, path, (30, 31))
    assert recorder.control.log == [("acceptance", 2, TARGET, 3, own_kept), ("commit", 7, (30, 31))]
    expected = [LevelWork("2-large", 0, 0.0, 1, 3, own_kept)]
    if own_kept == 3:
        expected.append(LevelWork("1-small", 0, 0.0, 1, 2, len(path) - 3))
    assert recorder.flush(()) == tuple(expected)
    assert (state.parts, state.num_merged, state.num_ordered) == ((), 0, 0), "a verdict is counted once"


def test_merged_nodes_are_the_child_s(recorder):
    """Own tokens 1 and 2, a tail of node 3, merged nodes 4 and 5."""
    recorder.record_verdict(offered(own=2, tail=1, merged=2, ordered=1), 1, (4, 5), ())
    assert recorder.flush(()) == (LevelWork("2-large", 0, 0.0, 1, 2, 0), LevelWork("1-small", 0, 0.0, 1, 2, 2))


def test_a_level_that_forwards_has_the_verdict_counted_for_its_source(recorder):
    recorder.record_verdict(offered(own=0, tail=3, merged=0, ordered=4), 1, (1, 2), (30,))
    assert recorder.control.log == [("acceptance", 1, TARGET, 4, 2), ("commit", 7, (30,))]
    recorder.control.log.clear()
    recorder.record_verdict(offered(own=0, tail=3, merged=0, ordered=0), 1, (1,), ())
    recorder.record_verdict(offered(own=0, tail=3, merged=0, ordered=4), None, (1,), ())
    assert recorder.control.log == []


def test_work_is_handed_on_once_with_that_of_the_levels_below(recorder):
    recorder.record_pass(0.5)
    below = [LevelWork("1-small", 1, 0.25)]
    assert recorder.flush(below) == (LevelWork("2-large", 1, 0.5), *below)
    assert recorder.flush(()) == ()


@pytest.mark.parametrize(
    ("lengths", "sources", "longest"),
    [((3, 4, 5), (None, 0, 1), (0, 3, 4)), ((3, 0, 5), (None, 0, 0), (0, 3, 3)), ((0, 0, 5), (None,) * 3, (0, 0, 0))],
)
def test_a_level_receives_from_the_next_one_below_that_drafts(lengths, sources, longest):
    passed = PassedLengths(lengths)
    assert tuple(passed.source(level) for level in range(3)) == sources
    assert tuple(passed.longest(level) for level in range(3)) == longest
