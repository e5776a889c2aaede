"""DraftAheadTiming on random times, against its estimates written out."""

from __future__ import annotations

import random

import pytest

from actors.drafters.draft_ahead.timing import SPARE, DraftAheadTiming


def mean(values):
    """Exponentially weighted with 0.8."""
    weights = [0.8**age for age in range(len(values))][::-1]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights) if values else 0.0


@pytest.mark.parametrize("seed", range(30))
def test_passes_at_once_end_before_a_preview_is_due(seed):
    draw, timing = random.Random(seed), DraftAheadTiming()
    timing.record_answer(0.0)
    assert timing.num_passes(0.0) == 1, "nothing is known"
    interval_s, pass_s, num_late = draw.uniform(1, 20), draw.uniform(0.1, 5), draw.randrange(3)
    timing.record_pass(-3 * pass_s, 0.0, num_passes=3)
    timing.record_arrival(interval_s)
    for _ in range(num_late):
        timing.preview_was_late()
    timing.record_answer(100.0)
    lead_s = min(num_late * pass_s, interval_s)
    for passed in (0.0, 0.3, 0.9):
        now = 100 + passed * interval_s
        left = (100 + interval_s - pass_s - lead_s - now) / pass_s
        num_passes = timing.num_passes(now)
        assert num_passes == max(1, int(left))
        assert num_passes == 1 or not timing.is_preview_due(now + (num_passes - 0.01) * pass_s)
    timing.record_arrival(100 + interval_s)
    assert timing.num_passes(200.0) == 1, "no verdict is awaited"


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(30))
def test_it_waits_and_shows_its_drafts_as_its_estimates_say(seed):
    draw, timing = random.Random(seed), DraftAheadTiming()
    now, lead_s, expected = 0.0, 0.0, False
    intervals, passes = [], []
    step_s = draw.choice([0.3, 3.0])
    for _ in range(40):
        interval_s, pass_s = mean(intervals), mean(passes)
        assert timing.interval_s == pytest.approx(interval_s)
        action = draw.choice(["answer", "pass", "arrival", "used", "late"])
        if action == "pass":
            length = step_s * draw.uniform(0.8, 1.2)
            timing.record_pass(now, now + length)
            passes.append(length)
            last, now = (now, now + length), now + length
        elif action == "answer" and not expected:
            timing.record_answer(now)
            answered_at, expected = now, True
        elif action == "arrival" and expected:
            timing.record_arrival(now)
            during = passes and now - last[1] < 0.1 * pass_s
            intervals.append((sum(last) / 2 if during else now) - answered_at)
            expected = False
        elif action == "used":
            timing.preview_used()
            lead_s *= 0.95
        elif action == "late":
            timing.preview_was_late()
            lead_s = min(lead_s + pass_s, interval_s)
        now += draw.uniform(0, 5)
        interval_s, pass_s = mean(intervals), mean(passes)
        if not expected:
            timing.record_arrival(now)  # of a record that answers nothing
            assert not timing.is_preview_due(now + 1e9) and timing.pause_s(now) == 0
            continue
        due_at = answered_at + interval_s
        assert timing.is_preview_due(due_at - pass_s - lead_s + 1e-4)
        assert not timing.is_preview_due(due_at - pass_s - lead_s - 1e-4)
        spares = interval_s >= SPARE * pass_s
        for at, waits in ((due_at - pass_s - 1e-4, False), (due_at - pass_s + 1e-4, True), (due_at + pass_s, False)):
            late_in = due_at + pass_s - at
            found = timing.pause_s(at)
            assert found == (pytest.approx(late_in) if waits and spares and late_in > 1e-6 else 0)


def test_previews_that_stream_leave_four_times_a_round():
    timing = DraftAheadTiming()
    timing.record_answer(0.0)
    timing.record_pass(0.0, 0.1)
    timing.record_arrival(4.0)
    timing.record_answer(10.0)
    timing.record_preview(10.0)
    assert timing.num_passes(10.0) == 39 and not timing.is_preview_due(13.8)
    timing.streams = True
    assert timing.num_passes(10.0) == 10 and timing.num_passes(10.95) == 1, "up to the next preview"
    assert [timing.is_preview_due(now) for now in (10.9, 11.0)] == [False, True]
    timing.record_preview(11.0)
    assert not timing.is_preview_due(11.9) and timing.num_passes(12.5) == 1


@pytest.mark.parametrize(("round_s", "due_s"), [(0.0, 3.9), (3.0, 3.9), (1.0, 0.9)])
def test_previews_of_a_far_drafter_leave_within_a_round_of_the_target(round_s, due_s):
    """Between the answer and the next record the target makes one pass; the rest is the way there and back."""
    timing = DraftAheadTiming()
    timing.record_answer(0.0)
    timing.record_pass(0.0, 0.1)
    timing.record_arrival(4.0)
    timing.round_s = round_s
    timing.record_answer(10.0)
    assert [timing.is_preview_due(10 + due_s + off) for off in (-1e-4, 1e-4)] == [False, True]
    assert timing.num_passes(10.0) in (round(10 * due_s) - 1, round(10 * due_s)), "up to the preview"
    shown_at = 10 + due_s + 0.01
    timing.record_preview(shown_at)
    is_far = round_s == 1.0
    assert timing.is_preview_due(shown_at + 0.1) is not is_far, "four in a round of the target at most"
    assert timing.is_preview_due(shown_at + 0.26)
