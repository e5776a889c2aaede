"""The life of one rank: wait until all of its role are there, join them, answer batches, and come back when told to.

One turn of the loop is one epoch. A rank that misses a batch, loses a peer or is recalled leaves its epoch: it closes
the group, forgets every request, keeps its weights, and waits to be told where the next one meets. Knows records and
the order they must come in; what a batch means is the business of the role.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from actors.protocol.membership import HEARTBEAT_S, Alive, Join, Ready, Recall, Stop, identity_of
from actors.protocol.messages import DraftBatch, VerifyBatch
from actors.transport.channel import Link
from actors.worker.logs import log_event, logger_of
from parallel.comm.group import Group, PeerLost

PATIENCE_S = 0.5
"""How long a rank listens before it looks whether anybody still wants it."""
_ARRIVED = -1
"""In place of the width of a step: a record has come, and there is none."""


class Role(Protocol):
    """What a rank plays."""

    wants_work: bool

    def answer(self, batch: Any) -> Any: ...

    def width(self) -> int:
        """Argument of the next step of work; the lead's is used by all ranks."""

    def work(self, width: int) -> None: ...

    def pause_s(self) -> float:
        """Seconds to listen before the next step of work."""

    def preview(self, *, last: bool) -> Any | None:
        """What work has prepared, if it should be told now; `last` if no more work follows before the next record."""

    def forget(self) -> None:
        """Drop every request; the next batch starts from nothing."""


@dataclass(slots=True)
class RankStatus:
    """What a rank says of itself; its loop writes it, its heart reads it."""

    role: str
    rank: int
    incarnation: int
    pid: int
    epoch: int = 0
    waiting: bool = True
    taken: int = 0
    busy: bool = False

    def beat(self, *, at_change: bool = False) -> Alive:
        return Alive(
            self.role,
            self.rank,
            self.incarnation,
            self.pid,
            self.epoch,
            self.waiting,
            self.taken,
            self.busy,
            at_change,
        )


class Heartbeat:
    """Beats from a thread of its own, over a link of its own, however long a pass takes."""

    def __init__(self, open_link: Callable[[], Link], status: RankStatus) -> None:
        self._open_link = open_link
        self._status = status
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heart-{status.role}-{status.rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        link = self._open_link()
        while not self._stopped.wait(HEARTBEAT_S):
            link.send(self._status.beat())
        link.close()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


class Rank:
    """`meet` makes the group of an epoch, `build` the role on it and the facts it reports; both may take their time."""

    def __init__(
        self,
        link: Link,
        status: RankStatus,
        meet: Callable[[Join], Group],
        build: Callable[[Group], tuple[Role, dict[str, object]]],
        device: str,
        *,
        observe: Callable[[str], None],
        unwanted: Callable[[], bool],
    ) -> None:
        self._link = link
        self._status = status
        self._meet = meet
        self._build = build
        self._device = device
        self._observe = observe
        self._unwanted = unwanted
        self._group: Group | None = None
        self._role: Role | None = None
        self._facts: dict[str, object] = {}
        self._logger = logger_of(identity_of(status.role, status.rank))
        self._call: Join | None = None  # the epoch to join next, where that is known already

    def serve(self) -> None:
        """Until `Stop`."""
        while (join := self._wait()) is not None:
            try:
                self._join(join)
                if not self._follow():
                    return
            except PeerLost as error:
                log_event(self._logger, "peer-lost", level=logging.WARNING, epoch=join.epoch, why=str(error))
            finally:
                self._leave()

    # --- from epoch to epoch ------------------------------------------------------------------------------------------

    def _wait(self) -> Join | None:
        """The next epoch, or None for the end."""
        call, self._call = self._call, None
        self._status.waiting = True
        if call is not None:
            return call
        self._link.send(self._status.beat(at_change=True))
        self._observe("waiting for its role")
        while not self._unwanted():
            record = self._link.receive(timeout_s=PATIENCE_S)
            if isinstance(record, Stop):
                return None
            if isinstance(record, Join) and record.epoch > self._status.epoch:
                return record
        return None

    def _join(self, join: Join) -> None:
        status = self._status
        status.epoch, status.taken, status.busy, status.waiting = join.epoch, join.round, False, False
        group = self._meet(join)
        if self._group is None:
            self._group = group
        else:
            self._group.adopt(group)
        if self._role is None:
            self._role, self._facts = self._build(self._group)
        self._say_ready()
        log_event(self._logger, "ready", epoch=join.epoch, **self._facts)
        self._observe(f"epoch {join.epoch}")

    def _leave(self) -> None:
        self._status.busy = False
        if self._group is not None:
            self._group.close()
        if self._role is not None:
            self._role.forget()

    def _say_ready(self) -> None:
        status = self._status
        self._link.send(Ready(status.role, status.rank, self._facts, status.epoch, status.incarnation))

    # --- within an epoch ----------------------------------------------------------------------------------------------

    def _follow(self) -> bool:
        """Answer batches until this epoch is over (True), or everything is (False)."""
        while True:
            record = self._next()
            match record:
                case Stop():
                    return False
                case Join():
                    self._call = record
                    return True
                case Recall():
                    return True
            if record.after != self._status.taken:
                log_event(self._logger, "missed", level=logging.WARNING, round=record.after, taken=self._status.taken)
                return True
            self._status.busy, self._status.taken = True, record.round
            for answer in self._role.answer(record):
                if self._status.rank == 0:
                    self._link.send(answer)
            self._status.busy = False
            self._observe(f"round {record.round}")
            if self._logger.isEnabledFor(logging.INFO):
                self._tell_of(record)

    def _tell_of(self, batch: VerifyBatch | DraftBatch) -> None:
        for admit in batch.admits:
            log_event(self._logger, "admit", request=admit.request_id, epoch=admit.epoch, tokens=len(admit.token_ids))
        if self._logger.isEnabledFor(logging.DEBUG):
            asked = batch.items if isinstance(batch, VerifyBatch) else batch.orders
            requests = [one.request_id for one in asked]
            log_event(self._logger, "round", level=logging.DEBUG, round=batch.round, requests=requests)

    def _next(self) -> Any:
        """The next record; until it arrives the role may work. All ranks of a group take the same number of steps."""
        while self._role.wants_work:
            record = self._between_steps() if self._status.rank == 0 else None
            width = self._role.width() if self._status.rank == 0 and record is None else _ARRIVED
            told = torch.tensor([width], dtype=torch.int64, device=self._device)
            if (width := int(self._group.broadcast(told).item())) == _ARRIVED:
                return record if record is not None else self._news(wait=True)
            self._role.work(width)
            if self._status.rank == 0 and not self._role.wants_work:
                self._send_preview(last=True)
        return self._news(wait=True)

    def _between_steps(self) -> Any | None:
        pause_s = self._role.pause_s()
        self._send_preview(last=pause_s > 0)
        return self._news(wait=False, for_s=pause_s)

    def _send_preview(self, *, last: bool) -> None:
        if (preview := self._role.preview(last=last)) is not None:
            self._link.send(preview)

    def _news(self, *, wait: bool, for_s: float = PATIENCE_S) -> Any:
        """The next record that is not of the past; None if none has come in time and nobody has to `wait`."""
        while True:
            record = self._link.receive(timeout_s=for_s)
            match record:
                case None:
                    if self._unwanted():
                        return Stop()
                    if not wait:
                        return None
                case Join() if record.epoch == self._status.epoch:
                    self._say_ready()  # the first time it was lost on the way
                case Join() | Recall():
                    if record.epoch > self._status.epoch:
                        return record
                case VerifyBatch() | DraftBatch():
                    if record.round > self._status.taken:
                        return record
                case Stop():
                    return record
