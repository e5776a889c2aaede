"""A rank's heartbeats: what it works on, sent from a thread and a link of its own, however long a pass takes."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from actors.protocol.membership import HEARTBEAT_S, Alive
from actors.transport.channel import Link


@dataclass(slots=True)
class RankStatus:
    """The state of a rank, written by its loop and read by its heartbeat; the fields are those of `Alive`."""

    role: str
    rank: int
    incarnation: int
    pid: int
    epoch: int = 0
    waiting: bool = True
    round: int = 0
    busy: bool = False

    def alive(self, *, off_schedule: bool = False) -> Alive:
        state = self.epoch, self.waiting, self.round, self.busy
        return Alive(self.role, self.rank, self.incarnation, self.pid, *state, off_schedule)


class Heartbeat:
    """Sends every `HEARTBEAT_S` from construction to `stop`, which closes the link."""

    def __init__(self, link: Link, status: RankStatus) -> None:
        self._link = link
        self._status = status
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heart-{status.role}-{status.rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            self._link.send(self._status.alive())
        self._link.close()
