"""A child level on ranks of its own: the records of `child.py` over the control connection.

Records pass through the coordinator's hub, which routes by role and reports to the parent's ranks when the child is
lost or back. While the child is lost the parent drafts without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from actors.protocol.membership import RoleBack, RoleLost
from actors.protocol.messages import DraftBatch, ProposalBatch
from actors.transport.mailbox import Mailbox
from parallel.comm.group import Group

_NO_ANSWER = -1
"""Broadcast of rank 0 while there is no answer; else the number of records of the answer, 0 if the child is lost."""


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

    def forget(self) -> None:
        """Nothing to do: the role below is recalled together with this one."""

    def post(self, batch: DraftBatch) -> None:
        self._answer, self._posted_epoch = [], self.epoch
        if self._present and self._is_lead:
            self._mailbox.send(replace(batch, after=self._posted_round, epoch=self.epoch))
            self._posted_round = batch.round

    def collect(self, round: int, *, wait: bool) -> list[ProposalBatch] | None:
        answer = self._receive_answer(round, wait=wait) if self._is_lead else None
        (agreed,) = self._group.agree([_NO_ANSWER if answer is None else len(answer)], self._device)
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
