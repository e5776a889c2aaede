"""The loop of a rank that drafts: between two batches it works ahead or learns, and shows what it has prepared.

How a rank joins and leaves its epochs is that of every rank (`rank_loop.py`). Knows when there is time for a step; what
a step does is known to the role.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from actors.protocol.messages import DraftBatch
from actors.roles.draft import DraftRole
from actors.worker.rank_loop import RankLoop, Record
from parallel.comm.group import Group

if TYPE_CHECKING:
    from actors.roles.bridge import FeatureReceiver

_RECORD = -1
"""Stands for the width of a step where a record has arrived, so that there is no step."""


@dataclass(eq=False)
class DraftRankLoop(RankLoop[DraftRole]):
    """All ranks of a group take the same number of steps, which the lead chooses."""

    batch_type = DraftBatch

    def serve(self) -> None:
        try:
            super().serve()
        finally:
            if self._role is not None:
                self._role.close()

    def _answers(self, role: DraftRole, batch: Any) -> Iterable[Any]:
        """Receives first the hidden states that were sent for the batch."""
        if not batch.exports:
            yield from role.answer(batch)
            return
        started = time.monotonic()
        features = cast("FeatureReceiver", self.bridge).receive(batch.exports)
        imported: tuple[float, float] | None = started, time.monotonic()
        for answer in role.answer(batch, features):
            yield replace(answer, imported=imported)
            imported = None

    def _next_record(self, group: Group, role: DraftRole) -> Record:
        """Works until it arrives, if there is work."""
        record = None
        while record is None and role.wants_work:
            if self._is_lead:
                pause_s = role.pause_s()
                self._send_preview(role, last=pause_s > 0)
                record = self._receive(pause_s)
            is_lead = self._is_lead and record is None
            step = (role.width(), role.num_passes()) if is_lead else (_RECORD, 1)
            width, num_passes = group.agree(step, self.spec.device)
            if width == _RECORD:
                break
            role.work(width, num_passes)
            if self._is_lead and not role.wants_work:
                self._send_preview(role, last=True)
        return super()._next_record(group, role) if record is None else record

    def _send_preview(self, role: DraftRole, *, last: bool) -> None:
        if (preview := role.preview(last=last)) is not None:
            self.link.send(preview)
