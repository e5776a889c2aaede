"""How long drafts are waited for, against the tokens that the target makes meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policy.draft_wait import HANG_S, JITTER_S, DraftWait

PASS_S = 0.1
counts = st.integers(0, 6)


def measured(weighs=True, tokens=4, longest=7, first=(), rest=()):
    """Passes of 100 ms, drafts that bring `tokens` with the target's own, delays as given."""
    wait = DraftWait(weighs, longest)
    wait.update_pass(3.0, reads_prompt=True)
    for _ in range(200):
        wait.update_pass(PASS_S, reads_prompt=False)
        wait.update_acceptance(tokens)
    wait.update_pass(3.0, reads_prompt=True)
    for delay in first:
        wait.update_delay(delay, is_rest=False)
    for delay in rest:
        wait.update_delay(delay, is_rest=True)
    return wait


@settings(deadline=None)
@given(st.integers(1, 6), counts, counts, st.integers(2, 7))
def test_at_the_longest_wait_the_target_makes_as_many_tokens_without_drafts(expecting, ready, plain, tokens):
    """Drafts that come at once: the wait that costs what they bring, and not less than the jitter of a host."""
    wait = measured(tokens=tokens, first=[0.0] * 8, rest=[0.0] * 8)
    for has_first_part in (False, True):
        longest_s = wait.wait_s(expecting, ready, plain, has_first_part=has_first_part)
        with_drafts = (expecting + ready) * tokens + plain  # in one pass and the wait before it
        without = ready * tokens + expecting + plain  # in each pass that starts at once
        assert longest_s == pytest.approx(max(JITTER_S, PASS_S * (with_drafts / without - 1)))


def test_it_is_waited_for_as_long_as_the_decision_reckoned_with():
    """A few poor drafts lately are no reason to give up a draft just before it comes."""
    wait = measured(longest=7, tokens=2)
    assert wait.wait_s(1) == pytest.approx(0.1)
    assert wait.wait_s(1, expected_s=0.15) == pytest.approx(0.3), "twice as long"
    assert wait.wait_s(1, expected_s=9.0) == pytest.approx(0.7), "no longer than the best draft is worth"
    assert wait.wait_s(1, 1, expected_s=0.15) < 0.1, "not where it holds up another request's draft"


@pytest.mark.parametrize("is_rest", [False, True])
@pytest.mark.parametrize(
    ("delays", "waits"),
    [
        ([0.1] * 8, True),
        ([0.31] * 8, False),
        ([0.2] * 5 + [9.0] * 3, False),  # 5 * 0.1 s saved, 3 * 0.3 s lost: a wait ends where it does not pay
        ([0.1] * 5 + [9.0] * 3, True),
        ([9.0] * 100 + [0.1] * 8, True),  # only the last eight count
        ([], True),
    ],
)
def test_a_wait_is_worth_it_if_it_had_saved_time_lately(delays, waits, is_rest):
    wait = measured(longest=3, **{"rest" if is_rest else "first": delays})
    assert wait.wait_s(1, has_first_part=is_rest) == (pytest.approx(0.3) if waits else 0.0)
    wait.clear_delays()
    assert wait.wait_s(1, has_first_part=is_rest) == pytest.approx(0.3), "nothing is known of delays again"


def test_the_first_part_is_judged_by_what_a_draft_brings_at_best():
    late = measured(longest=7, tokens=2, first=[0.5] * 8, rest=[0.5] * 8)
    assert late.wait_s(1) == pytest.approx(0.7), "longer than it pays lately, not longer than it might"
    assert late.wait_s(1, has_first_part=True) == 0.0
    assert measured(longest=7, tokens=2, first=[0.8] * 8).wait_s(1) == 0.0


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("delays", [{}, {"first": [0.5] * 8}, {"first": [0.8] * 8}, {"rest": [9.0] * 8}])
def test_where_the_drafter_does_not_work_ahead_the_rest_is_judged_as_the_first_part(delays, weighs):
    """The first part holds next to nothing then: a pass that begins without the rest verifies almost no draft."""
    wait = measured(weighs=weighs, longest=7, tokens=2, **delays)
    for load in ((1,), (3, 2, 1), (1, 0, 40)):
        rest_s = wait.wait_s(*load, has_first_part=True, works_ahead=False)
        assert rest_s == wait.wait_s(*load, works_ahead=False) == wait.wait_s(*load)
        assert rest_s > 0 or load != (1,) or "first" in delays
    pays = {"works_ahead": True, "has_first_part": True}
    assert (wait.wait_s(1, **pays) == 0) is ("rest" in delays), "a drafter that works ahead is judged by its rests"


def test_where_waiting_is_not_weighed_the_first_part_is_awaited_until_it_hangs():
    never = measured(weighs=False, longest=3, first=[9.0] * 8, rest=[0.1] * 8)
    assert never.wait_s(1) == HANG_S == never.wait_s(1, has_first_part=True)
    assert measured(weighs=False, rest=[9.0] * 8).wait_s(1, has_first_part=True) == 0.0


def test_before_a_pass_was_measured_a_pass_over_prompts_stands_for_it():
    wait = DraftWait(True, 3)
    assert wait.wait_s(1) == JITTER_S
    wait.update_pass(0.2, reads_prompt=True)
    assert wait.wait_s(1) == pytest.approx(0.6), "and all draft tokens are expected to be accepted"
    wait.update_acceptance(1)
    tokens = (0.9 * 4 + 1) / 1.9
    assert wait.wait_s(1, has_first_part=True) == pytest.approx(0.2 * (tokens - 1))
