"""A rank's heartbeats: what it works on, sent from a thread and a link of its own, however long a pass takes.

The same thread receives recalls and orders of a bridge, which reach a rank here while its main thread waits inside a
pass; and the end of the session, after which there is no receiver of heartbeats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from actors.protocol.membership import HEARTBEAT_S, Alive, Bridge, Recall, Stop
from actors.transport.channel import AnyLink


class Heartbeat:
    """Sends `status()` every `HEARTBEAT_S` from construction to `stop` or a `Stop`, and closes the link then; passes
    each order to `on_order`. `stop` waits for the end: without a `Stop` up to `HEARTBEAT_S`."""

    def __init__(self, link: AnyLink, status: Callable[[], Alive], on_order: Callable[[Recall | Bridge], None]) -> None:
        self._link = link
        self._status = status
        self._on_order = on_order
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heart-{status().identity}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + HEARTBEAT_S
        while not self._stopped.is_set():
            left_s = due - time.monotonic()
            if left_s > 0:
                record = self._link.receive(left_s)
                if isinstance(record, Stop):
                    break
                if isinstance(record, Recall | Bridge):
                    self._on_order(record)
                continue
            self._link.send(self._status())
            due = time.monotonic() + HEARTBEAT_S
        self._link.close()
