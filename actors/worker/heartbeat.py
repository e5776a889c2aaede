"""A rank's heartbeats: what it works on, sent from a thread and a link of its own, however long a pass takes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from actors.protocol.membership import HEARTBEAT_S, Alive
from actors.transport.channel import Link


class Heartbeat:
    """Sends `status()` every `HEARTBEAT_S` from construction to `stop`, which closes the link."""

    def __init__(self, link: Link, status: Callable[[], Alive]) -> None:
        self._link = link
        self._status = status
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heart-{status().identity}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            self._link.send(self._status())
        self._link.close()
