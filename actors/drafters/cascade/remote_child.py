"""A child level on ranks of its own: the records of `child.py` over the control connection.

Records pass through the coordinator's hub, which routes by role and reports to the parent's ranks when the child is
lost or back. While the child is lost the parent drafts without it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch

from actors.protocol.membership import Recall, RoleBack, RoleLost, Stop
from actors.protocol.messages import DraftBatch, ProposalBatch
from actors.transport.channel import Link
from parallel.comm.group import Group

ANSWER_S = 1.0
"""Seconds after which an answer counts as lost, and the parent drafts without it."""
_NO_ANSWER = -1
"""Broadcast of rank 0 while there is no answer; else the number of records of the answer, 0 if the child is lost."""


class Mailbox:
    """Sorts the records of one link into those for the rank and those from its child level."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._for_rank: deque[Any] = deque()
        self._from_child: deque[Any] = deque()

    def send(self, record: Any) -> None:
        self._link.send(record)

    @property
    def has_child_records(self) -> bool:
        """Whether a record from the child has arrived that was not read yet."""
        return bool(self._from_child)

    def receive(self, timeout_s: float | None = None) -> Any | None:
        """The next record for the rank; None after `timeout_s`, or as soon as one from the child arrives instead."""
        while not self._for_rank:
            num_records = len(self._from_child)
            if not self._receive(timeout_s) or len(self._from_child) > num_records:
                return None
        return self._for_rank.popleft()

    def receive_from_child(self, *, wait: bool, is_promised: bool = False) -> Any | None:
        """The next record from the child; None after `ANSWER_S` (without `wait`: at once), or if one for the rank is
        there.

        A promised record was sent: only the end of the epoch ends the wait for it.
        """
        while not self._from_child:
            if any(not is_promised or isinstance(record, Recall | Stop) for record in self._for_rank):
                return None
            if not self._receive(None if is_promised else ANSWER_S if wait else 0):
                return None
        return self._from_child.popleft()

    def close(self) -> None:
        self._link.close()

    def _receive(self, timeout_s: float | None) -> bool:
        record = self._link.receive(timeout_s)
        if record is None:
            return False
        from_child = isinstance(record, ProposalBatch | RoleLost | RoleBack)
        (self._from_child if from_child else self._for_rank).append(record)
        return True


class RemoteChild:
    """A `ChildPort` to a role.

    All ranks of the parent receive the answers, each at its own time, but they must act alike. So only rank 0 sends,
    and broadcasts whether an answer is complete.
    """

    is_remote = True

    def __init__(self, mailbox: Mailbox, group: Group, device: str = "cpu") -> None:
        self.epoch = 0
        self._posted_epoch = 0
        self._posted_round = 0  # the last one of this epoch
        self._mailbox = mailbox
        self._group = group
        self._device = device
        self._is_lead = group.rank == 0
        self._present = True
        self._answer: list[ProposalBatch] = []

    @property
    def has_records(self) -> bool:
        return self._mailbox.has_child_records

    def post(self, batch: DraftBatch) -> None:
        self._answer, self._posted_epoch = [], self.epoch
        if self._present and self._is_lead:
            self._mailbox.send(replace(batch, after=self._posted_round, epoch=self.epoch))
            self._posted_round = batch.round

    def collect(self, round: int, *, wait: bool) -> list[ProposalBatch] | None:
        answer = self._receive_answer(round, wait=wait) if self._is_lead else None
        if self._group.size == 1:
            return answer
        code = torch.tensor([_NO_ANSWER if answer is None else len(answer)], device=self._device)
        agreed = int(self._group.broadcast(code).item())
        if self._is_lead or agreed == _NO_ANSWER:
            return answer
        return self._receive_answer(round, wait=True, is_promised=True) if agreed else []

    def poll(self) -> None:
        while self._is_lead and (record := self._mailbox.receive_from_child(wait=False)) is not None:
            self._apply(record, 0)

    def _receive_answer(self, round: int, *, wait: bool, is_promised: bool = False) -> list[ProposalBatch] | None:
        while is_promised or (self._present and self.epoch == self._posted_epoch):
            record = self._mailbox.receive_from_child(wait=wait, is_promised=is_promised)
            if record is None:
                return None
            self._apply(record, round)
            if self._answer and not self._answer[-1].num_missing:
                return self._answer
        return []

    def _apply(self, record: Any, round: int) -> None:
        match record:
            case ProposalBatch() if record.round == round:
                self._answer.append(record)
            case RoleLost():
                self._present = False
            case RoleBack():
                self._present = True
                if record.epoch != self.epoch:
                    self.epoch, self._posted_round = record.epoch, 0
