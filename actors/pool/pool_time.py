"""Where the time of a pool goes: into calls of its drafter, which run the passes, or outside them.

Outside them there is host time, in which a lease has something to do, as taking a record in, asking for a pass or
sending drafts, and the device waits for it; the rest is idle time, in which all leases wait for records. Both are of
the pool as a whole: leases that work side by side outside passes are counted once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PoolTime:
    """Counts from construction on. Called by all threads of the pool."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._at = clock()
        self._num_busy = 0  # leases that do not wait for a record
        self._is_passing = False
        self._pass_s = self._host_s = 0.0

    def spent(self) -> tuple[float, float]:
        """Seconds in calls of the drafter, and seconds of the host outside them."""
        with self._changing():
            return self._pass_s, self._host_s

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A call of the drafter."""
        with self._changing():
            self._is_passing = True
        try:
            yield
        finally:
            with self._changing():
                self._is_passing = False

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A lease runs."""
        with self._changing():
            self._num_busy += 1
        try:
            yield
        finally:
            with self._changing():
                self._num_busy -= 1

    @contextmanager
    def resting(self) -> Iterator[None]:
        """A lease that runs waits for a record."""
        with self._changing():
            self._num_busy -= 1
        try:
            yield
        finally:
            with self._changing():
                self._num_busy += 1

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The time until now is that of the state until now."""
        with self._lock:
            now = self._clock()
            if self._is_passing:
                self._pass_s += now - self._at
            elif self._num_busy:
                self._host_s += now - self._at
            self._at = now
            yield
