"""Virtual time: one clock of events, and lanes that work one record at a time as the real loops do.

A lane keeps its own time while it works, runs ahead of the clock by as much as its passes cost, and takes what
arrived meanwhile when it is through. It knows that roles answer records, not what the records say.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

ARRIVAL, STEP, ALARM = 0, 1, 2
"""Of events at one instant, arrivals come first: a role that finishes a pass sees what has just arrived. Alarms ring
last, since what they warn of may have come."""


class Clock:
    """Calls what was planned, in the order of its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, kind: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, kind, next(self._order), call))

    def run(self) -> None:
        """Until nothing is planned any more."""
        while self._events:
            self.now, _, _, call = heapq.heappop(self._events)
            call()


class LaneTime:
    """A lane's own time; calling it reads it, as one reads time.monotonic."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


class Role(Protocol):
    """What `actors/worker/factory.py` asks of a role."""

    wants_work: bool

    def answer(self, record: Any) -> Iterator[Any]: ...

    def width(self) -> int: ...

    def work(self, width: int) -> None: ...

    def pause_s(self) -> float: ...

    def preview(self, *, last: bool) -> Any | None: ...


class Lane:
    """Serves one role: records in order of arrival, and between them, one step at a time, work of its own."""

    def __init__(self, clock: Clock, time: LaneTime, role: Role, send: Callable[[Any, float], None]) -> None:
        self.busy: list[tuple[float, float]] = []
        self._clock = clock
        self._time = time
        self._role = role
        self._send = send
        self._inbox: deque[Any] = deque()
        self._resting = True
        self._pauses = 0  # also records end them: an alarm that comes late is for nobody

    def receive(self, record: Any) -> None:
        self._inbox.append(record)
        self._pauses += 1
        if self._resting:
            self._resting = False
            self._time.now = self._clock.now
            self._step()

    def _step(self) -> None:
        started = self._time.now
        if self._inbox:
            for answer in self._role.answer(self._inbox.popleft()):
                self._send(answer, self._time.now)
        elif self._role.wants_work:
            pause_s = self._role.pause_s()
            self._send_preview(last=pause_s > 0)
            if pause_s > 0:
                self._pause(pause_s)
                return
            self._role.work(self._role.width())
            if not self._role.wants_work:
                self._send_preview(last=True)
        else:
            self._resting = True
            return
        if self._time.now > started:
            self.busy.append((started, self._time.now))
        self._clock.at(self._time.now, STEP, self._step)

    def _send_preview(self, *, last: bool) -> None:
        if (preview := self._role.preview(last=last)) is not None:
            self._send(preview, self._time.now)

    def _pause(self, seconds: float) -> None:
        """Listen for so long, and go on unless a record came."""
        self._resting = True
        self._pauses += 1
        pause = self._pauses

        def wake() -> None:
            if pause == self._pauses:
                self._resting, self._time.now = False, self._clock.now
                self._step()

        self._clock.at(self._time.now + seconds, STEP, wake)
