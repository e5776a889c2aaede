"""A level of a cascade on ranks of its own: the records of `beneath.py` over the control line.

Records pass through the coordinator's hub, which knows where each role lives and tells the ranks of the level above
when the level beneath is lost or back. A level that is lost is silent: the one above drafts by itself.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from actors.lifecycle import RoleBack, RoleLost
from actors.messages import DraftBatch, ProposalBatch


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

    def receive(self, timeout_s: float | None = None) -> Any | None:
        """The next record for the rank."""
        while not self._for_rank:
            if not self._sort(timeout_s):
                return None
        return self._for_rank.popleft()

    def receive_from_level(self, *, wait: bool) -> Any | None:
        """The next record from the level beneath; None if there is none yet, or if the rank is called away."""
        while not self._for_level:
            if wait and self._for_rank:
                return None
            if not self._sort(None if wait else 0):
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


class RemoteLevel:
    """A `LevelPort` to a role. All ranks of the level above hear the answers; only its lead speaks."""

    has_own_lane = True

    def __init__(self, mailbox: Mailbox, *, is_lead: bool) -> None:
        self.life = 0
        self._mailbox = mailbox
        self._is_lead = is_lead
        self._present = True
        self._answer: list[ProposalBatch] = []

    def post(self, batch: DraftBatch) -> None:
        self._answer = []
        if self._present and self._is_lead:
            self._mailbox.send(batch)

    def collect(self, round: int, *, wait: bool) -> list[ProposalBatch] | None:
        while self._present:
            record = self._mailbox.receive_from_level(wait=wait)
            if record is None:
                return None
            self._hear(record, round)
            if self._answer and not self._answer[-1].num_missing:
                return self._answer
        return []

    def listen(self) -> None:
        """Hear whether the level was lost, or has come back."""
        while (record := self._mailbox.receive_from_level(wait=False)) is not None:
            self._hear(record, 0)

    def _hear(self, record: Any, round: int) -> None:
        match record:
            case ProposalBatch() if record.round == round:
                self._answer.append(record)
            case RoleLost():
                self._present = False
            case RoleBack():
                self._present = True
                self.life += 1
