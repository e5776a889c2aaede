"""The heartbeats of the coordinator: sent by its loop, and by a thread of their own while one record takes longer.

The supervisor ends a coordinator without heartbeats, and a long record is no reason to. A loop that stands still for
`HUNG_S` is: from then on the thread is silent too. Knows nothing of what the loop does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from actors.protocol.membership import HEARTBEAT_S

HUNG_S = 10.0
"""Longer than any record that is accepted takes: the loop hangs."""


class LoopHeartbeat:
    """Calls `send` every `HEARTBEAT_S` from construction to `stop`, as long as the loop calls `beat` at least as often
    as every `HUNG_S`; from that call if it comes in time, else from another thread."""

    def __init__(self, send: Callable[[], None]) -> None:
        self._send = send
        self._moved_at = self._sent_at = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator-heart", daemon=True)
        self._thread.start()

    def beat(self, now: float) -> bool:
        """The loop has come round at `now`, a monotonic clock; whether a heartbeat was due and has been sent."""
        self._moved_at = now
        if now - self._sent_at < HEARTBEAT_S:
            return False
        self._sent_at = now
        self._send()
        return True

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            now = time.monotonic()
            if now - self._sent_at >= 2 * HEARTBEAT_S and now - self._moved_at < HUNG_S:
                self._sent_at = now
                self._send()
