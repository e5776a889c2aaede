"""The loop of one rank: wait until its role is complete, join the others, answer batches, leave, and wait again.

One turn is one epoch. A rank that misses a batch, loses a peer or is recalled leaves its epoch: it closes the group,
drops every request, keeps its weights, and waits for the next `Join`. If the waits of its group cannot be aborted, its
process ends instead, and the supervisor starts another. Knows records and their order; what a batch means
is known to the role. A rank that drafts has a loop that does more between batches (`draft_rank_loop.py`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from actors.logs import log_event, logger_of
from actors.protocol.membership import Alive, Bridge, Death, Join, PassFailed, Ready, Recall, Stop, Weights
from actors.protocol.messages import DraftBatch, VerifyBatch
from actors.transport.channel import AnyLink
from actors.worker.spec import RankSpec
from parallel.comm.group import Group, PeerLost

if TYPE_CHECKING:
    from actors.roles.bridge import BridgeEnd
    from actors.transport.mailbox import Mailbox

CHECK_S = 0.5
"""Seconds between two calls of `cancelled` while no record arrives; before each record it is called too."""
_NOT_ABORTABLE = "target.all_reduce=symmetric: a process does not outlive its epoch"
Record = Join | Recall | Stop | VerifyBatch | DraftBatch
"""What a rank acts on."""


def _exit_at_once() -> None:
    """Exits at once: the main thread may wait for a kernel that never ends."""
    os._exit(1)


class RankRole(Protocol):
    """What a rank runs: the target's or the drafter's part."""

    def answer(self, batch: Any) -> Iterable[Any]: ...

    def forget(self) -> None:
        """Drop every request; the next batch starts from nothing."""
        ...

    def rejoin(self, weights: Weights | None) -> None:
        """Begin another epoch, beside ranks that may be new: serve these weights of the target, None: those that it
        has. ValueError if they cannot be had."""
        ...


Role = TypeVar("Role", bound=RankRole)


@dataclass(eq=False)
class RankLoop(Generic[Role]):
    """The loop of a target rank. `join_group` makes the process group of an epoch; `build`, called once, makes the role
    on it and its facts.

    `observe` receives a line for each change of state; `cancelled` ends the loop, as `Stop` does. `bridge` is this
    rank's end of the one over which hidden states are sent, if they are.
    """

    spec: RankSpec
    link: AnyLink | Mailbox
    join_group: Callable[[RankSpec, Join], Group]
    build: Callable[[RankSpec, Group], tuple[Role, dict[str, object]]]
    observe: Callable[[str], None]
    cancelled: Callable[[], bool]
    bridge: BridgeEnd | None = None
    end_process: Callable[[], None] = _exit_at_once

    batch_type = VerifyBatch
    """What is answered."""

    def __post_init__(self) -> None:
        self._round, self._is_busy = 0, False  # apart from the rest of the status, since they change in every round
        self._status = Alive(self.spec.role, self.spec.rank, self.spec.incarnation, os.getpid())
        self._is_lead = self.spec.rank == 0
        self._logger = logger_of(self.spec.identity)
        self._group: Group | None = None
        self._role: Role | None = None
        self._facts: dict[str, Any] = {}

    @property
    def status(self) -> Alive:
        """The present one, which the heartbeat sends from its own thread."""
        return replace(self._status, round=self._round, busy=self._is_busy)

    @status.setter
    def status(self, status: Alive) -> None:
        self._round, self._is_busy, self._status = status.round, status.busy, status

    def heartbeat(self) -> Alive:
        """The present status."""
        return self.status if self.bridge is None else replace(self.status, bridge=self.bridge.number)

    def interrupt(self, order: Recall | Bridge) -> None:
        """Leave the epoch, or only the bridge, from another thread: the pass may wait for a dead peer. Ignored if it is
        outdated."""
        group, status = self._group, self.status
        leaves = isinstance(order, Recall) and order.epoch > status.epoch and not status.waiting
        ends = list[Callable[[], None]]()
        if group is not None and leaves:
            if not group.is_abortable:
                log_event(self._logger, "ends", level=logging.WARNING, epoch=status.epoch, why=_NOT_ABORTABLE)
                self.end_process()
            ends.append(group.interrupt)
        if self.bridge is not None and (leaves or (isinstance(order, Bridge) and order.number > self.bridge.number)):
            ends.append(self.bridge.interrupt)
        # At once: the end of one group of GPUs may wait for a kernel that waits for a peer of the other.
        threads = [threading.Thread(target=end, name="interrupt") for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def serve(self) -> None:
        """Serves until `Stop`."""
        join = self._await_join()
        while join is not None:
            following: Join | Stop | None = None
            try:
                group, role = self._join(join)
                following = self._answer_batches(group, role)
            except Exception as error:
                if not (isinstance(error, PeerLost) or self._is_interrupted()):
                    self._report_failure(error)
                    raise  # else it comes from what a pass returned after its group was closed
                log_event(self._logger, "peer-lost", level=logging.WARNING, epoch=join.epoch, why=str(error))
            finally:
                self._leave()
            if isinstance(following, Stop):
                return
            if self._group is not None and not self._group.is_abortable:
                raise PeerLost(_NOT_ABORTABLE)
            self._update(waiting=True)
            join = following if following is not None else self._await_join()

    # --- from epoch to epoch ------------------------------------------------------------------------------------------

    def _await_join(self) -> Join | None:
        """The next epoch, or None to end."""
        self.link.send(replace(self.status, off_schedule=True))
        self.observe("waiting for its role")
        while not self.cancelled():
            record = self.link.receive(timeout_s=CHECK_S)
            if isinstance(record, Stop):
                return None
            if isinstance(record, Join) and record.epoch > self.status.epoch:
                return record
        return None

    def _join(self, join: Join) -> tuple[Group, Role]:
        self._update(epoch=join.epoch, round=join.round, busy=False, waiting=False)
        group = self.join_group(self.spec, join)
        if self._group is None:
            self._group = group
        else:
            self._group.adopt(group)
        if self.bridge is not None:
            self.bridge.group = self._group
        if self._role is None:
            spec = self.spec if join.weights is None else replace(self.spec, weights=join.weights)
            self._role, self._facts = self.build(spec, self._group)
        else:
            self._role.rejoin(join.weights)
        self._send_ready()
        log_event(self._logger, "ready", epoch=join.epoch, **self._facts)
        self.observe(f"epoch {join.epoch}")
        return self._group, self._role

    def _is_interrupted(self) -> bool:
        try:
            self._check()
        except PeerLost:
            return True
        return False

    def _check(self) -> None:
        """PeerLost if the results of the pass mean nothing, because another thread ended what it waited for."""
        if self._group is not None:
            self._group.check()
        if self.bridge is not None:
            self.bridge.check()

    def _leave(self) -> None:
        self._update(busy=False)
        if self.bridge is not None:
            self.bridge.close()
        if self._group is not None:
            self._group.close()
        if self._role is not None:
            self._role.forget()

    def _update(self, **changes: Any) -> None:
        """Change the status."""
        self.status = replace(self.status, **changes)

    def _report_failure(self, error: Exception) -> None:
        """The requests of the batch that is worked on may be the reason."""
        status = self.status
        if status.busy:
            why = Death.by(status.identity, error).text
            self.link.send(PassFailed(status.role, status.rank, status.incarnation, status.round, why))

    def _send_ready(self) -> None:
        status = self.status
        self.link.send(Ready(status.role, status.rank, self._facts, status.epoch, status.incarnation))

    # --- within an epoch ----------------------------------------------------------------------------------------------

    def _answer_batches(self, group: Group, role: Role) -> Join | Stop | None:
        """Answers until this epoch is over: the record of the next one or of the end, None if neither has come yet."""
        while True:
            record = self._next_record(group, role)
            if isinstance(record, Join | Stop):
                return record
            if isinstance(record, Recall):
                return None
            last_round = self._round
            if record.after != last_round:
                log_event(self._logger, "missed", level=logging.WARNING, round=record.after, last_round=last_round)
                return None
            self._is_busy, self._round = True, record.round
            for answer in self._answers(role, record):
                self._check()
                if self._is_lead:
                    self.link.send(answer)
            self._is_busy = False
            self.observe(f"round {record.round}")
            if self._logger.isEnabledFor(logging.INFO):
                self._log_batch(record)

    def _answers(self, role: Role, batch: VerifyBatch | DraftBatch) -> Iterable[Any]:
        return role.answer(batch)

    def _log_batch(self, batch: VerifyBatch | DraftBatch) -> None:
        for admit in batch.admits:
            log_event(self._logger, "admit", request=admit.request_id, epoch=admit.epoch, tokens=len(admit.token_ids))
        if self._logger.isEnabledFor(logging.DEBUG):
            rows = batch.items if isinstance(batch, VerifyBatch) else batch.orders
            requests = [row.request_id for row in rows]
            log_event(self._logger, "round", level=logging.DEBUG, round=batch.round, requests=requests)

    def _next_record(self, group: Group, role: Role) -> Record:  # noqa: ARG002 (a target has no work between batches)
        """The next record, whenever it comes."""
        record = None
        while record is None:
            record = self._receive(CHECK_S)
        return record

    def _receive(self, timeout_s: float) -> Record | None:
        """The next record that is not outdated, or None after `timeout_s`; `Stop` if the rank is cancelled, also where
        records never cease."""
        while not self.cancelled():
            record = self.link.receive(timeout_s=timeout_s)
            match record:
                case None:
                    return None
                case Join() if record.epoch == self.status.epoch:
                    self._send_ready()  # the first one was lost on the way
                case Bridge():
                    if self.bridge is not None:
                        self.bridge.form(record)
                case Join() | Recall():
                    if record.epoch > self.status.epoch:
                        return record
                case VerifyBatch() | DraftBatch() if isinstance(record, self.batch_type):
                    if record.round > self._round:
                        return record
                case Stop():
                    return record
        return Stop()
