"""The link of a rank as two queues: records for the rank itself, and those of a drafter on ranks of its own that drafts
for this one (a level of a cascade). It must not know what either does with them."""

from __future__ import annotations

from collections import deque
from typing import Any

from actors.protocol.membership import Recall, RoleBack, RoleLost, Stop
from actors.protocol.messages import ProposalBatch
from actors.transport.channel import AnyLink

ANSWER_S = 1.0
"""Seconds after which an answer counts as lost, and the parent drafts without it."""


class Mailbox:
    """Sorts the records of one link into those for the rank and those from its child level."""

    def __init__(self, link: AnyLink) -> None:
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
