"""How many completions the server has in flight, the bound on them, and whether it still takes new ones.

Used on the event loop; `drain` may be called from any thread. Knows no requests.
"""

from __future__ import annotations

import threading

from cluster.serving.errors import RETRY_AFTER_S, ApiError, too_many


class InFlightLimit:
    """Admits at most `most` completions at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num = 0
        self._changed = threading.Condition()
        self.is_draining = False

    @property
    def num(self) -> int:
        """Completions in flight."""
        return self._num

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
            if self._num + num > self._most:
                raise too_many(f"{self._num} completions run or wait, of {self._most} at most; try again later")
            self._num += num

    def leave(self, num: int) -> None:
        with self._changed:
            self._num -= num
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new ones and wait for those in flight; whether all ended in time."""
        with self._changed:
            self.is_draining = True
            return self._changed.wait_for(lambda: not self._num, timeout_s)
