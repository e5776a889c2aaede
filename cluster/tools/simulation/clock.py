"""Virtual time: an event queue, lanes of roles and coordinator that serve records as real loops do, and shares of time.

A lane's own time runs ahead of the event queue by the cost of its passes; records that arrive meanwhile are served
after them. Lanes deliver records without reading them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from actors.coordinator.state_machine import Coordinator
from actors.roles.draft import DraftRole

ARRIVAL, STEP, ALARM = 0, 1, 2
"""Order of events at one instant: a role that finishes a pass sees records that arrive at that moment, and an alarm
fires only if the record it waits for has not come."""

Interval = tuple[float, float]


class VirtualClock:
    """Runs scheduled calls in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, kind: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, kind, next(self._order), call))

    def run(self, until: float = math.inf) -> None:
        """Runs events until none is left, or the next one is later than `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, _, call = heapq.heappop(self._events)
            call()
        if until < math.inf:
            self.now = until


class LaneClock:
    """A lane's own time; a call returns it, as time.monotonic does."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Disturbances:
    """A machine that changes its speed and pauses, the same whatever runs on it: times follow from `seed`.

    In each phase of `phase_s` seconds passes take up to exp(`slowest`) times as long. In each interval of
    `pause_every_s` seconds (0: none) one pause of 5 to 60 ms begins; a pass under way then ends so much later.
    """

    slowest: float = 0.0
    pause_every_s: float = 0.0
    phase_s: float = 2.0
    seed: int = 0

    def seconds(self, started: float, pass_s: float) -> float:
        """How long a pass takes that begins at this time, and takes `pass_s` on a quiet machine."""
        if not (self.slowest or self.pause_every_s):
            return pass_s
        pass_s *= math.exp(self.slowest * self._draw("phase", int(started / self.phase_s)).random())
        if not self.pause_every_s:
            return pass_s
        paused_s, every_s = 0.0, self.pause_every_s
        for number in range(int(started / every_s), int((started + pass_s) / every_s) + 1):
            draw = self._draw("pause", number)
            if started <= (number + draw.random()) * every_s < started + pass_s:
                paused_s += draw.uniform(5e-3, 60e-3)
        return pass_s + paused_s

    def _draw(self, name: str, number: int) -> random.Random:
        return random.Random(f"{self.seed} {name} {number}")


QUIET = Disturbances()


@dataclass(slots=True)
class RoleLane:
    """Serves one role: records in order of arrival and, for a draft role, steps of draft-ahead between them."""

    _clock: VirtualClock
    _time: LaneClock
    _answer: Callable[[Any], Iterator[Any]]
    _send: Callable[[Any, float], None]
    _ahead: DraftRole | None = None
    busy: list[Interval] = field(default_factory=list)
    _inbox: deque[Any] = field(default_factory=deque)
    _resting: bool = True
    _num_pauses: int = 0  # a record ends a pause too: a wake-up with an older count is ignored

    def receive(self, record: Any) -> None:
        self._inbox.append(record)
        self._num_pauses += 1
        if self._resting:
            self._resume()

    def _resume(self) -> None:
        self._resting, self._time.now = False, self._clock.now
        self._step()

    def _step(self) -> None:
        started, role = self._time.now, self._ahead
        if self._inbox:
            for answer in self._answer(self._inbox.popleft()):
                self._send(answer, self._time.now)
        elif role is not None and role.wants_work:
            pause_s = role.pause_s()
            self._send_preview(role, last=pause_s > 0)
            if pause_s > 0:
                self._pause(pause_s)
                return
            role.work(role.width())
            if not role.wants_work:
                self._send_preview(role, last=True)
        else:
            self._resting = True
            return
        if self._time.now > started:
            self.busy.append((started, self._time.now))
        self._clock.at(self._time.now, STEP, self._step)

    def _send_preview(self, role: DraftRole, *, last: bool) -> None:
        if (preview := role.preview(last=last)) is not None:
            self._send(preview, self._time.now)

    def _pause(self, seconds: float) -> None:
        """Resume after `seconds` unless a record arrives first."""
        self._resting = True
        self._num_pauses += 1
        pause = self._num_pauses
        self._clock.at(self._time.now + seconds, STEP, lambda: self._resume() if pause == self._num_pauses else None)


@dataclass(slots=True)
class CoordinatorLane:
    """Serves the coordinator: one record after the other, each of which takes it `_record_s`, and the ends of its
    waits. `_send` is given what it answers."""

    coordinator: Coordinator
    _clock: VirtualClock
    _send: Callable[[Iterable[Any]], None]
    _record_s: float = 0.0
    is_alive: bool = True
    """A dead one drops what arrives."""
    _free_at: float = 0.0  # when it has handled every record that has arrived so far

    def receive(self, record: Any, sent: float, delay_s: float = 0.0) -> None:
        """The record arrives `delay_s` after it was sent."""
        self._clock.at(sent + delay_s, ARRIVAL, partial(self.queue, record))

    def queue(self, record: Any) -> None:
        """The record has arrived, and waits for those before it."""
        if not self._record_s:
            self.take(record)
            return
        self._free_at = max(self._free_at, self._clock.now) + self._record_s
        self._clock.at(self._free_at, ARRIVAL, partial(self.take, record))

    def take(self, record: Any) -> None:
        if self.is_alive:
            self._answer(self.coordinator.on(record, self._clock.now))

    def _stop_waiting(self) -> None:
        if self.is_alive:
            self._answer(self.coordinator.stop_waiting(self._clock.now))

    def _answer(self, answers: Iterable[Any]) -> None:
        self._send(answers)
        if (ends := self.coordinator.wait_until) is not None:
            self._clock.at(max(self._clock.now, ends), ALARM, self._stop_waiting)


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Fractions of a window of time; target + draft + exchange = 1."""

    target: float
    """The target computes."""
    draft: float
    """The drafter computes and the target does not."""
    exchange: float
    """Neither computes: links and coordinator."""
    draft_busy: float
    """The drafter computes, whatever the target does."""


def split_time(target: Sequence[Interval], draft: Sequence[Interval], start: float, end: float) -> TimeShares:
    """Shares of [start, end]; the intervals of a lane ascend and do not overlap."""
    target_s, draft_s = (float(np.diff(_busy_until(lane, [start, end]))[0]) for lane in (target, draft))
    clipped = np.clip(np.ravel(target), start, end)
    alone_s = draft_s - float(np.diff(_busy_until(draft, clipped))[::2].sum())
    length = end - start
    idle_s = max(0.0, length - target_s - alone_s)
    return TimeShares(target_s / length, alone_s / length, idle_s / length, draft_s / length)


def _busy_until(intervals: Sequence[Interval], times: np.ndarray | Sequence[float]) -> np.ndarray:
    """Seconds that a lane was busy before each of `times`."""
    edges = np.concatenate([[0.0], np.ravel(intervals)])  # 0, start, end, start, end, ...
    spans = np.diff(edges)
    spans[::2] = 0.0  # from an end to the next start
    return np.asarray(np.interp(times, edges, np.concatenate([[0.0], np.cumsum(spans)])))
