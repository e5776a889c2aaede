"""What the choice of lengths is made from: costs, acceptance and the target's time, against sums by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.drafters.cascade import draft_lengths
from actors.drafters.cascade.draft_lengths import TARGET, LengthControl
from actors.policy.cascade_model import acceptance_of
from actors.protocol.messages import LevelWork, TokenTree

BOUNDS = (5, 4, 6)
NAMES = ("a", "b", "c")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def asked(monkeypatch):
    """The arguments of every choice; the answer is one more at each level than the time before."""
    calls: list[Any] = []

    def best(costs, verify_s, bounds):
        calls.append(SimpleNamespace(costs=costs, verify_s=verify_s, bounds=bounds))
        return tuple(len(calls) for _ in bounds)

    monkeypatch.setattr(draft_lengths, "best_lengths", best)
    return calls


def control(*, drafts_at_once=True, **options: Any) -> LengthControl:
    return LengthControl(BOUNDS, NAMES, drafts_at_once, **options)


def worked(one: LengthControl, **times: tuple[int, float]) -> None:
    one.record_work([LevelWork(name, *counts) for name, counts in times.items()])


def test_costs_are_seconds_per_pass_of_levels_with_and_without_drafts_to_review(asked):
    one = control()
    worked(one, a=(4, 2.0), b=(2, 3.0))
    assert one.choose() == BOUNDS and not asked, "the last level has not worked yet"
    worked(one, c=(1, 8.0))
    one.lengths = (0, 4, 6)
    worked(one, b=(4, 1.0))
    assert one.choose() == (1, 1, 1)
    (call,) = asked
    assert call.bounds == BOUNDS and call.costs.drafts_at_once is True
    assert call.costs.pass_s == {
        (0, False): 0.5,
        (0, True): 0.5,
        (1, True): 1.5,
        (1, False): 0.25,
        (2, True): 8.0,
        (2, False): 8.0,
    }, "where only one of the two was seen it stands for both"


def test_a_pause_counts_as_twice_the_mean(asked):
    one = control()
    worked(one, a=(2, 2.0), b=(1, 1.0), c=(1, 1.0))
    worked(one, a=(3, 90.0))
    worked(one, b=(0, 50.0))
    one.choose()
    assert asked[0].costs.pass_s[0, False] == pytest.approx((2.0 + 2 * 3 * 1.0) / 5)
    assert asked[0].costs.pass_s[1, True] == 1.0, "work without a pass is no pass"


def test_a_first_level_that_is_a_model_costs_by_token(asked):
    one = control(drafts_at_once=False)
    worked(one, a=(7, 3.0), b=(1, 1.0), c=(1, 1.0))
    one.record_acceptance(0, 1, 4, 2)
    one.record_acceptance(0, TARGET, 2, 2)
    one.record_acceptance(1, 2, 9, 0)
    one.choose()
    assert asked[0].costs.pass_s[0, False] == 0.5 and asked[0].costs.drafts_at_once is False


def test_acceptance_is_the_mean_with_its_standard_error_and_at_most_all(asked):
    one = control()
    worked(one, a=(1, 1.0), b=(1, 1.0), c=(1, 1.0))
    outcomes = [(6, 1), (4, 4), (5, 1), (5, 2)]
    for offered, accepted in outcomes:
        one.record_acceptance(0, 1, offered, accepted)
    one.record_acceptance(2, TARGET, 3, 3)
    one.choose()
    mean, square = 2.0, (1 + 16 + 1 + 4) / 4
    credited = mean + ((square - mean**2 + 1.0) / 4) ** 0.5
    assert asked[0].costs.acceptance == {
        (0, 1): pytest.approx(acceptance_of(credited, 5.0, 1)),
        (2, TARGET): pytest.approx(1.0),
    }


def test_the_targets_time_is_a_line_through_its_rounds_and_never_half_of_the_mean(asked):
    clock = Clock()
    one = control(clock=clock)
    worked(one, a=(1, 1.0), b=(1, 1.0), c=(1, 1.0))
    for num_sent, seconds in ((2.0, 1.0), (4.0, 2.0), (2.0, 1.0), (4.0, 2.0)):
        one.drafts_sent(num_sent)
        clock.now += seconds
        one.drafts_ordered({})
    verify_s = asked[-1].verify_s
    assert verify_s(2) < verify_s(3) < verify_s(4) and 1.2 < verify_s(3) < 1.8
    assert verify_s(5) - verify_s(4) == pytest.approx(verify_s(4) - verify_s(3)), "a line"
    assert verify_s(-100) == pytest.approx(0.5 * verify_s(3), rel=0.1)


def test_time_in_which_a_request_arrived_is_not_the_targets(asked):
    clock = Clock()
    one = control(clock=clock)
    worked(one, a=(1, 1.0), b=(1, 1.0), c=(1, 1.0))
    for arrives in (False, True, False):
        one.drafts_sent(3.0)
        clock.now += 1000.0 if arrives else 1.0
        if arrives:
            one.request_opened()
        one.drafts_ordered({})
    one.choose()
    assert asked[-1].verify_s(3) == pytest.approx(1.0)


def test_a_choice_is_made_every_other_order_agreed_on_and_what_is_older_counts_less(asked):
    heard: list[tuple[int, ...]] = []

    def agree(lengths):
        heard.append(lengths)
        return (9, 8, 7)

    one = control(agree=agree)
    worked(one, a=(1, 1.0), b=(1, 1.0), c=(1, 1.0))
    one.record_acceptance(0, 1, 4, 4)
    for number in range(1, 5):
        one.drafts_ordered({})
        assert len(asked) == len(heard) == number // 2
        assert one.lengths == ((9, 8, 7) if number > 1 else BOUNDS) and one.bounds == BOUNDS
    assert heard == [(1, 1, 1), (2, 2, 2)]
    one.record_acceptance(0, 1, 4, 0)
    one.choose()
    old = 0.99**2
    weight, mean = old + 1, 4 * old / (old + 1)
    credited = mean + ((16 * old / weight - mean**2 + 1.0) / weight) ** 0.5
    assert asked[-1].costs.acceptance == {(0, 1): pytest.approx(acceptance_of(credited, 4.0, 1), abs=1e-6)}


def test_the_targets_tokens_judge_the_drafts_of_the_text_they_were_ordered_for(asked):
    one = control()
    worked(one, a=(1, 1.0), b=(1, 1.0), c=(1, 1.0))
    tree = TokenTree.chain(1, [10, 11, 12])
    one.drafts_ordered({7: 20, 8: 30})
    one.record_draft(7, 20, 0, 3, tree)
    one.record_draft(7, 21, 1, 3, tree)
    one.record_draft(9, 20, 1, 3, tree)
    one.record_commit(7, (10, 11))
    one.record_commit(7, (10, 11, 12))
    one.record_draft(8, 30, 1, 3, tree)
    one.record_commit(8, ())
    one.choose()
    assert set(asked[-1].costs.acceptance) == {(0, TARGET)}, "of the others nothing is known"
    credited = min(2.0, 2.0 + 1.0)
    assert asked[-1].costs.acceptance[0, TARGET] == pytest.approx(acceptance_of(credited, 2.0, 1))
