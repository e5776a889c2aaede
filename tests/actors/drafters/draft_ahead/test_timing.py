"""DraftAheadTiming on scripted times: what it learns, when it waits, and when it does not."""

from __future__ import annotations

import pytest

from actors.drafters.draft_ahead.timing import SPARE, DraftAheadTiming


def steady(distance: float, step: float, rounds: int = 5) -> DraftAheadTiming:
    """After some rounds in which a record came `distance` after each answer; an answer was just given at time 0."""
    timing, now = DraftAheadTiming(), -100.0
    for _ in range(rounds):
        timing.record_answer(now)
        timing.record_pass(now, now + step)
        now += distance
        timing.record_arrival(now)
    timing.record_answer(0.0)
    return timing


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
    timing = DraftAheadTiming()
    for _ in range(50):
        timing.record_answer(0.0)
        timing.record_pass(9.0, 11.0)
        timing.record_arrival(11.01)
    timing.record_answer(0.0)
    assert timing.pause_s(9.0) == pytest.approx(10.0 + 2.0 - 9.0)


def test_nothing_is_expected_before_anything_was_answered():
    timing = DraftAheadTiming()
    timing.record_arrival(3.0)
    assert timing.pause_s(4.0) == 0


def test_previews_leave_before_the_last_step_and_earlier_where_that_was_too_late():
    timing = DraftAheadTiming()

    def first_preview(rounds, outcome):
        for _ in range(rounds):
            timing.record_answer(0.0)
            timing.record_pass(0.0, 1.0)
            outcome()
            timing.record_arrival(20.0)
        timing.record_answer(0.0)
        return next(at for at in range(40) if timing.is_preview_due(at + 0.5))

    assert first_preview(1, lambda: None) == 19
    assert first_preview(5, timing.preview_was_late) == 14
    assert first_preview(100, timing.preview_was_late) == 0, "not before an answer"
    assert first_preview(200, timing.preview_used) == 19
