"""Shares of time against counting instants, virtual time, and a lane that serves what arrived before it goes on."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from cluster.tools.simulation.clock import (
    ALARM,
    ARRIVAL,
    STEP,
    Disturbances,
    LaneClock,
    RoleLane,
    VirtualClock,
    split_time,
)


def intervals(draw, count):
    """Disjoint and ascending, with ends at tenths."""
    edges = sorted(draw.sample(range(1, 400), 2 * count))
    return [(start / 10, end / 10) for start, end in pairwise(edges)][::2]


@pytest.mark.parametrize("seed", range(20))
def test_shares_of_time_are_those_counted_instant_by_instant(seed):
    draw = random.Random(seed)
    target, draft = intervals(draw, draw.randrange(1, 15)), intervals(draw, draw.randrange(1, 15))
    start, end = sorted(draw.sample(range(400), 2))
    instants = np.arange(start, end) / 10 + 0.05
    busy = [np.array([any(begin < at < stop for begin, stop in lane) for at in instants]) for lane in (target, draft)]
    shares = split_time(target, draft, start / 10, end / 10)
    verifies, drafts = busy
    assert shares.target == pytest.approx(verifies.mean()) and shares.draft_busy == pytest.approx(drafts.mean())
    assert shares.draft == pytest.approx((drafts & ~verifies).mean())
    assert shares.exchange == pytest.approx((~drafts & ~verifies).mean())


def test_calls_are_made_in_the_order_of_their_times_and_kinds():
    clock, made = VirtualClock(), []
    assert clock.now == 0.0

    def note(name):
        made.append((clock.now, name))
        if name == "first":
            clock.at(2.0, ALARM, lambda: note("alarm"))
            clock.at(2.0, STEP, lambda: note("step"))
            clock.at(2.0, ARRIVAL, lambda: note("arrival"))
            clock.at(2.0, ARRIVAL, lambda: note("later arrival"))

    clock.at(3.0, ARRIVAL, lambda: note("last"))
    clock.at(1.0, ALARM, lambda: note("first"))
    clock.run()
    at_two = [(2.0, name) for name in ("arrival", "later arrival", "step", "alarm")]
    assert made == [(1.0, "first"), *at_two, (3.0, "last")]


class Drafter:
    """Works ahead for two steps of a second each, the second of them a pause of a second later."""

    def __init__(self, time):
        self.time, self.steps, self.paused = time, 2, False

    @property
    def wants_work(self):
        return self.steps > 0

    def pause_s(self):
        if self.steps == 1 and not self.paused:
            self.paused = True
            return 1.0
        return 0.0

    def width(self):
        return 7

    def work(self, width):
        assert width == 7
        self.steps, self.paused = self.steps - 1, False
        self.time.now += 1.0

    def preview(self, *, last):
        return ("preview", last)


def run_lane(arrivals, ahead):
    """A lane that takes half a second for a record; what it sends, and when it was busy."""
    clock, time, sent = VirtualClock(), LaneClock(), []
    drafter = Drafter(time) if ahead else None

    def answer(record):
        if drafter is not None:
            drafter.steps = 2
        time.now += 0.5
        yield record

    lane = RoleLane(clock, time, answer, lambda record, at: sent.append((at, record)), drafter)
    for at in arrivals:
        clock.at(at, ARRIVAL, lambda at=at: lane.receive(f"record of {at}"))
    clock.run()
    return sent, lane.busy


def test_records_are_served_one_after_the_other():
    sent, busy = run_lane([1.0, 1.25, 4.0], ahead=False)
    assert sent == [(1.5, "record of 1.0"), (2.0, "record of 1.25"), (4.5, "record of 4.0")]
    assert busy == [(1.0, 1.5), (1.5, 2.0), (4.0, 4.5)]


def test_between_records_it_works_ahead_and_a_record_ends_a_pause():
    sent, busy = run_lane([1.0], ahead=True)
    previews = [(1.5, False), (2.5, True), (3.5, False), (4.5, True)]  # before a step, a pause, a step; after the last
    assert sent == [(1.5, "record of 1.0"), *((at, ("preview", last)) for at, last in previews)]
    assert busy == [(1.0, 1.5), (1.5, 2.5), (3.5, 4.5)]
    _, busy = run_lane([1.0, 3.0], ahead=True)
    assert busy[2:] == [(3.0, 3.5), (3.5, 4.5), (5.5, 6.5)], "the pause that the record ended does not end again"
    _, busy = run_lane([1.0, 2.0], ahead=True)
    assert busy[1:3] == [(1.5, 2.5), (2.5, 3.0)], "a record that comes during a step waits for its end"


# --- a machine that is not quiet --------------------------------------------------------------------------------------


def test_a_quiet_machine_adds_nothing():
    assert Disturbances().seconds(3.0, 0.01) == 0.01


def test_slow_phases_are_the_same_for_every_pass_in_them():
    slow = Disturbances(slowest=1.0, phase_s=2.0)
    factors = [slow.seconds(2.0 * phase, 0.01) / 0.01 for phase in range(200)]
    assert all(1 <= factor <= np.e for factor in factors) and min(factors) < 1.5 and max(factors) > 2
    assert slow.seconds(0.1, 0.01) == slow.seconds(1.9, 0.01) != slow.seconds(2.1, 0.01)


def test_each_interval_has_one_pause_whatever_the_passes_are():
    """Passes end to end meet every pause once: the time beyond their own does not depend on their length."""
    paused = Disturbances(pause_every_s=1.0)
    lost = []
    for pass_s in (0.003, 0.02, 0.07):
        now, worked = 0.0, 0.0
        for _ in range(int(50 / pass_s)):
            now, worked = now + paused.seconds(now, pass_s), worked + pass_s
        lost.append((now - worked) / now)
    assert all(share == pytest.approx(0.0325, rel=0.2) for share in lost), "32.5 ms a second in the mean"
