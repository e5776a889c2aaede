"""DraftAheadTiming on scripted times: what it learns, when it waits, and when it does not."""

from __future__ import annotations

import pytest

from actors.drafters.draft_ahead.timing import SPARE, DraftAheadTiming


def steady(distance: float, step: float, rounds: int = 5) -> DraftAheadTiming:
    """After some rounds in which a record came `distance` after each answer; an answer was just given at time 0."""
    patience, now = DraftAheadTiming(), -100.0
    for _ in range(rounds):
        patience.answered(now)
        patience.stepped(now, now + step)
        now += distance
        patience.arrived(now)
    patience.answered(0.0)
    return patience


def test_a_step_that_fits_in_is_made():
    assert steady(10.0, 1.0).pause_s(8.9) == 0


def test_a_step_that_would_run_into_the_record_waits_for_it_and_a_little_longer():
    assert steady(10.0, 1.0).pause_s(9.5) == pytest.approx(1.5)


def test_an_overdue_record_is_not_waited_for():
    assert steady(10.0, 1.0).pause_s(11.0) == 0
    assert steady(10.0, 1.0).pause_s(11.0 - 1e-9) == 0, "no wait so short that time stands still"


def test_where_steps_are_few_none_is_spared():
    assert steady(SPARE - 0.5, 1.0).pause_s(SPARE - 1.0) == 0
    assert steady(SPARE + 0.5, 1.0).pause_s(SPARE) > 0


def test_what_came_during_a_step_came_half_way():
    patience = DraftAheadTiming()
    for _ in range(50):
        patience.answered(0.0)
        patience.stepped(9.0, 11.0)
        patience.arrived(11.01)
    patience.answered(0.0)
    assert patience.pause_s(9.0) == pytest.approx(10.0 + 2.0 - 9.0)


def test_nothing_is_expected_before_anything_was_answered():
    patience = DraftAheadTiming()
    patience.arrived(3.0)
    assert patience.pause_s(4.0) == 0


def test_what_is_prepared_is_told_before_the_last_step_and_earlier_where_that_was_too_late():
    patience = DraftAheadTiming()

    def first_told(rounds, told):
        for _ in range(rounds):
            patience.answered(0.0)
            patience.stepped(0.0, 1.0)
            told()
            patience.arrived(20.0)
        patience.answered(0.0)
        return next(at for at in range(40) if patience.is_time_to_tell(at + 0.5))

    assert first_told(1, lambda: None) == 19
    assert first_told(5, patience.told_too_late) == 14
    assert first_told(100, patience.told_too_late) == 0, "not before there is anything to tell"
    assert first_told(200, patience.told_in_time) == 19
