"""A level of a cascade on ranks of its own: the records of `beneath.py` over the control line.

Records pass through the coordinator's hub, which knows where each role lives and tells the ranks of the level above
when the level beneath is lost or back. A level that is lost is silent: the one above drafts by itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, Protocol

import torch

from actors.protocol.membership import Recall, RoleBack, RoleLost, Stop
from actors.protocol.messages import DraftBatch, ProposalBatch
from parallel.comm.group import Group

ANSWER_S = 1.0
"""An answer that takes longer was lost, or is not worth waiting for: the level above drafts by itself."""
_NOTHING = -1
"""What the lead tells the other ranks while there is no answer; else in how many parts it came, 0 for silence."""


class Line(Protocol):
    """What a rank speaks through, as `wire.Link`."""

    def send(self, record: Any) -> None: ...

    def receive(self, timeout_s: float | None = None) -> Any | None: ...


class Mailbox:
    """A line on which two kinds of letters arrive: those for the rank, and those from the level beneath it."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._for_rank: deque[Any] = deque()
        self._for_level: deque[Any] = deque()

    def send(self, record: Any) -> None:
        self._line.send(record)

    @property
    def has_letter(self) -> bool:
        """Whether the level beneath has said something that was not read yet."""
        return bool(self._for_level)

    def receive(self, timeout_s: float | None = None) -> Any | None:
        """The next record for the rank; None in time, or as soon as the level beneath says something instead."""
        while not self._for_rank:
            num_letters = len(self._for_level)
            if not self._sort(timeout_s) or len(self._for_level) > num_letters:
                return None
        return self._for_rank.popleft()

    def receive_from_level(self, *, wait: bool, is_promised: bool = False) -> Any | None:
        """The next record from the level beneath; None if there is none (in time), or if the rank is called away first.

        One that is promised has been sent: it is left for nothing but the end of the epoch.
        """
        while not self._for_level:
            if any(not is_promised or isinstance(record, Recall | Stop) for record in self._for_rank):
                return None
            if not self._sort(None if is_promised else ANSWER_S if wait else 0):
                return None
        return self._for_level.popleft()

    def close(self) -> None:
        self._line.close()

    def _sort(self, timeout_s: float | None) -> bool:
        record = self._line.receive(timeout_s)
        if record is None:
            return False
        from_level = isinstance(record, ProposalBatch | RoleLost | RoleBack)
        (self._for_level if from_level else self._for_rank).append(record)
        return True


class RemoteChild:
    """A `ChildPort` to a role. All ranks of the level above hear the answers; only its lead speaks, and says when one
    counts: each hears at moments of its own, but they have to act alike."""

    has_own_lane = True

    def __init__(self, mailbox: Mailbox, group: Group, device: str = "cpu") -> None:
        self.life = 0  # the epoch of the role
        self._asked_in = 0
        self._posted = 0  # the last round in it
        self._mailbox = mailbox
        self._group = group
        self._device = device
        self._is_lead = group.rank == 0
        self._present = True
        self._answer: list[ProposalBatch] = []

    def post(self, batch: DraftBatch) -> None:
        self._answer, self._asked_in = [], self.life
        if self._present and self._is_lead:
            self._mailbox.send(replace(batch, after=self._posted, epoch=self.life))
            self._posted = batch.round

    @property
    def has_news(self) -> bool:
        return self._mailbox.has_letter

    def collect(self, round: int, *, wait: bool) -> list[ProposalBatch] | None:
        heard = self._hear_out(round, wait=wait) if self._is_lead else None
        if self._group.size == 1:
            return heard
        code = torch.tensor([_NOTHING if heard is None else len(heard)], device=self._device)
        agreed = int(self._group.broadcast(code).item())
        if self._is_lead or agreed == _NOTHING:
            return heard
        return self._hear_out(round, wait=True, is_promised=True) if agreed else []

    def _hear_out(self, round: int, *, wait: bool, is_promised: bool = False) -> list[ProposalBatch] | None:
        while is_promised or (self._present and self.life == self._asked_in):
            record = self._mailbox.receive_from_level(wait=wait, is_promised=is_promised)
            if record is None:
                return None
            self._hear(record, round)
            if self._answer and not self._answer[-1].num_missing:
                return self._answer
        return []

    def listen(self) -> None:
        """Hear whether the level was lost, or has come back. Beside the lead, an answer may be there already."""
        while self._is_lead and (record := self._mailbox.receive_from_level(wait=False)) is not None:
            self._hear(record, 0)

    def _hear(self, record: Any, round: int) -> None:
        match record:
            case ProposalBatch() if record.round == round:
                self._answer.append(record)
            case RoleLost():
                self._present = False
            case RoleBack():
                self._present = True
                if record.epoch != self.life:
                    self.life, self._posted = record.epoch, 0
