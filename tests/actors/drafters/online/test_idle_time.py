"""When a drafter learns, on clocks of the tests' own."""

from __future__ import annotations

import random

import pytest

from actors.drafters.interface import Capabilities, Draft
from actors.drafters.online.idle_time import LONG_WAIT, MOST_DELAYED, IdleTime
from actors.protocol.messages import Admit, DraftBatch, DraftOrder, LearningWork, SamplingParams, TokenTree
from actors.roles.draft import DraftRole


def test_steps_take_their_share_of_idle_time_and_no_more():
    times, now = IdleTime(0.25, 0.0), 0.0
    times.answered(now)
    while now < 10.0:
        if pause := times.pause_s(now):
            now += pause
        else:
            times.learned(now, now + 0.01)
            now += 0.01
    assert 0.2 * now < times.spent_s <= 0.25 * now + 0.01


@pytest.mark.parametrize("step_s", [0.002, 0.02])
def test_steps_end_before_the_record_or_delay_it_by_a_bounded_share(step_s):
    times, now, interval, late_s, num_steps = IdleTime(1.0, 0.0), 0.0, 0.01, 0.0, 0
    for _ in range(2000):
        times.answered(now)
        due = now + interval
        while now < due:
            pause = times.pause_s(now)
            if pause:
                now = min(due, now + pause)
            else:
                times.learned(now, now + step_s)
                now, num_steps = now + step_s, num_steps + 1
        late_s += now - due
        times.record_arrived(now)
        now += 0.002
    assert num_steps > 0
    assert late_s <= 2 * MOST_DELAYED * now + step_s
    if step_s < interval / 4:
        assert num_steps > 2000, "short steps fit into every wait"


# --- a role on a busy machine -----------------------------------------------------------------------------------------


class _Learner:
    """Drafts nothing and always has something to learn; a step has 7 ms of work and a shared processor."""

    idle_share = 1.0
    wants_learning = True

    def __init__(self, machine: _BusyMachine) -> None:
        self.capabilities = Capabilities(learns=self)
        self.machine, self.num_steps = machine, 0

    def open(self, context) -> None:
        """Keeps nothing of a request."""

    release = open

    def observe(self, context, commit) -> None:
        """Nor of a verdict."""

    def propose(self, contexts, budgets) -> list[Draft]:
        return [Draft.chosen(TokenTree.chain(context.token_ids[-1], [])) for context in contexts]

    def learn(self) -> None:
        self.num_steps += 1
        self.machine.now += self.machine.stretched(0.007)

    def save(self) -> None:
        """Nowhere."""

    def learning(self) -> LearningWork:
        return LearningWork(0, False, self.num_steps, 0, 0, 0, 0.0, 0.0, 0.0)


class _BusyMachine:
    """Work takes up to six times as long as alone, and one piece of twenty is held up for tenths of a second."""

    def __init__(self) -> None:
        self.now, self.random = 0.0, random.Random(0)

    def stretched(self, seconds: float) -> float:
        return seconds * self.random.uniform(1, 6) + (self.random.random() < 0.05) * self.random.uniform(0.1, 0.4)


def test_a_busy_machine_learns_in_the_pauses_and_its_rounds_go_on():
    """45 requests of 15 rounds with 2 s between them: steps take a fifth of the pauses and more, and records that are
    expected wait for a hundredth of the time."""
    machine = _BusyMachine()
    learner = _Learner(machine)
    role = DraftRole(learner, clock=lambda: machine.now)
    late_s, answered = [0.0, 0.0], 0

    def wait(seconds: float) -> float:
        """Works until the next record; returns by how much the role is late for it."""
        arrives = machine.now + seconds
        while machine.now < arrives:
            pause = role.pause_s()
            machine.now = min(arrives, machine.now + pause) if pause else machine.now
            if not pause:
                role.work()
        return machine.now - arrives

    for request in range(45):
        for step in range(15):
            late_s[step > 0] += wait(machine.stretched(0.04) if step else 2.0)
            admits = () if step else (Admit(request, 0, (1, 2), 2, SamplingParams()),)
            releases = (request - 1,) if request and not step else ()
            answered += 1
            batch = DraftBatch(answered, admits, (), releases, (DraftOrder(request, 4),))
            for _ in role.answer(batch):
                machine.now += machine.stretched(0.01)
    of_request, of_rounds = late_s
    assert learner.num_steps > 500
    assert of_rounds < 0.015 * machine.now
    assert of_request < 45 * 2 * 0.1, "as many steps as a pause has lasted, at least, come before one that may be late"
    reported = role._learning()
    assert reported is not None and reported.delayed_s == pytest.approx(of_request + of_rounds, rel=0.5)


def waited(intervals: list[float]) -> IdleTime:
    """The state after records that came so long after the answers before them, all of them without delay; now is
    100."""
    times, now = IdleTime(1.0, 0.0), 100.0 - sum(intervals)
    for interval in intervals:
        times.answered(now)
        now += interval
        times.record_arrived(now)
    times.answered(now)
    return times


def test_where_nothing_is_expected_a_step_waits_for_a_long_wait():
    times = waited([0.01] * 10)
    times.learned(99.0, 99.02)
    assert times.pause_s(100.021) == pytest.approx(LONG_WAIT * 0.02 - 0.021), (
        "late by an interval, and the wait is short"
    )
    assert times.pause_s(100.001 + LONG_WAIT * 0.02) == 0.0


def test_a_pause_between_requests_is_not_when_the_next_record_is_expected():
    times = waited([0.01] * 10 + [20.0])
    times.learned(50.0, 50.1)
    assert times.pause_s(100.05) > 0.0, "a step of 0.1 s would run into a round"


def test_a_late_first_record_of_a_request_takes_no_time_from_later_rounds():
    times = waited([1.0] * 10)
    times.learned(108.0, 110.0)  # a step that hung
    assert times.record_arrived(110.0) == 109.0
    assert times.delayed_s == 1.0
    times.answered(110.0)
    times._step.mean = 0.01
    assert times.pause_s(110.0) == 0.0


def test_delays_of_rounds_stop_learning_until_they_are_a_small_share_of_the_time():
    times = waited([1.0] * 10)
    times.learned(100.0, 102.0)
    assert times.record_arrived(102.0) == 101.0
    times._step.mean = 0.01
    times.answered(102.0)
    assert times.pause_s(102.0) > 0.0
    times.record_arrived(103.0)
    times.answered(103.0 + 1.0 / MOST_DELAYED)
    assert times.pause_s(103.0 + 1.0 / MOST_DELAYED) == 0.0
