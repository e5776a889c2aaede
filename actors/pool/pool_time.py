"""Where the time of a pool goes: into calls of its drafter, which run the passes, or outside them.

Outside them there is host time, in which a lease has something to do, as taking a record in, asking for a pass or
sending drafts, and the device waits for it; the rest is idle time, in which all leases wait for records. Both are of
the pool as a whole: leases that work side by side outside passes are counted once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class PoolTime:
    """Counts from construction on. Called by all threads of the pool."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._at = clock()
        self._num_busy = 0  # leases that do not wait for a record
        self._num_passing = 0
        self._pass_s = self._host_s = 0.0

    def spent(self) -> tuple[float, float]:
        """Seconds in calls of the drafter, and seconds of the host outside them."""
        return self._change()

    def passing(self) -> AbstractContextManager[None]:
        """A call of the drafter."""
        return self._counted(passes=1)

    def serving(self) -> AbstractContextManager[None]:
        """A lease runs."""
        return self._counted(busy=1)

    def resting(self) -> AbstractContextManager[None]:
        """A lease that runs waits for a record."""
        return self._counted(busy=-1)

    @contextmanager
    def _counted(self, *, passes: int = 0, busy: int = 0) -> Iterator[None]:
        """So many more of each while it lasts."""
        self._change(passes, busy)
        try:
            yield
        finally:
            self._change(-passes, -busy)

    def _change(self, passes: int = 0, busy: int = 0) -> tuple[float, float]:
        """The time until now is that of the state until now; returns both sums."""
        with self._lock:
            now = self._clock()
            if self._num_passing:
                self._pass_s += now - self._at
            elif self._num_busy:
                self._host_s += now - self._at
            self._at = now
            self._num_passing += passes
            self._num_busy += busy
            return self._pass_s, self._host_s
