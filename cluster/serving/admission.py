"""How many completions the server has in flight, the bounds on them, and whether it still takes new ones.

The wait for a place in the batch is estimated from how many wait and from how fast such waiting ended lately, whatever
it is that they wait for: seats, KV rows or passes. Used on the event loop; `drain` may be called from any thread. Knows
no requests.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from cluster.serving.errors import RETRY_AFTER_S, ApiError, too_many

_FEWEST = 16
"""Completions that have to have begun while others waited, before the wait of the next one is estimated."""
_MOST = 64
"""The latest of them are counted."""
_LONGEST_RETRY_S = 60


class InFlightLimit:
    """Admits at most `most` completions at a time, and none whose first token would come after `most_queue_s`."""

    def __init__(self, most: int, most_queue_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._most_queue_s = most_queue_s
        self._clock = clock
        self.num = 0
        """Completions in flight."""
        self._num_waiting = 0  # those without a token
        self._begins: deque[float] = deque(maxlen=_MOST)  # when completions began, since there was none that waited
        self._changed = threading.Condition()
        self.is_draining = False

    def check_size(self, num: int) -> None:
        """Raise ApiError for a request of so many completions if it can never enter."""
        if num > self._most:
            line = f"n: {num} completions are more than the server runs and queues at a time ({self._most})"
            raise ApiError(400, line, param="n")

    def enter(self, num: int) -> None:
        """Take places for so many completions, all or none of them; raises ApiError if there are none."""
        with self._changed:
            if self.is_draining:
                headers = {"retry-after": str(RETRY_AFTER_S)}
                raise ApiError(503, "the server is shutting down", code="shutting_down", headers=headers)
            self.check_size(num)
            wait_s = self._wait_s(self._num_waiting)
            if (excess := self.num + num - self._most) > 0:
                line = f"{self.num} completions run or wait, of {self._most} at most; try again later"
                raise too_many(line, _whole_seconds(self._wait_s(excess)))
            if wait_s > self._most_queue_s:
                line = f"{self._num_waiting} completions wait, the last of them for {wait_s:.0f} s by estimate"
                limit = f"server.max_queue_s is {self._most_queue_s:g}; try again later"
                raise too_many(f"{line}, and {limit}", _whole_seconds(wait_s - self._most_queue_s))
            self.num += num
            self._num_waiting += num

    def began(self) -> None:
        """A completion has its first token."""
        with self._changed:
            self._begins.append(self._clock())
            self._no_longer_waiting(1)

    def leave(self, num: int, *, num_waiting: int) -> None:
        """So many ended, of which some without a token."""
        with self._changed:
            self.num -= num
            self._no_longer_waiting(num_waiting)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new ones and wait for those in flight; whether all ended in time."""
        with self._changed:
            self.is_draining = True
            return self._changed.wait_for(lambda: not self.num, timeout_s)

    def _no_longer_waiting(self, num: int) -> None:
        self._num_waiting -= num
        if not self._num_waiting:
            self._begins.clear()  # a time in which none waited says nothing of how long one would

    def _wait_s(self, num: int) -> float:
        """Seconds in which so many will begin, by estimate; 0 while too little is known."""
        if len(self._begins) < _FEWEST:
            return 0.0
        return num * (self._clock() - self._begins[0]) / len(self._begins)


def _whole_seconds(seconds: float) -> int:
    return min(max(RETRY_AFTER_S, math.ceil(seconds)), _LONGEST_RETRY_S)
