"""Draft passes of a target by some of its own layers, over its own KV rows.

A sequence's draft borrows the rows that the target has committed and adds rows of its own, in free slots of the
target's pool. They never enter the target's table, so what the target keeps is exact whatever the draft did. All draft
rows go back before the target reserves its own. Knows no tokens and no drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from parallel.kv.pass_plan import PendingRows, Span
from parallel.kv.pool import SeqId
from parallel.model.layer_plan import LayerPlan
from parallel.model.layers.attention import PassPlan
from parallel.runtime.runner import ModelRunner, PassOutput


@dataclass(frozen=True, slots=True)
class _DraftOf:
    """The identifier in the pool of a sequence's draft by one runner."""

    seq_id: SeqId
    runner: int


class SelfDraftRunner(ModelRunner):
    """A `ModelRunner` that runs `layers` of the target's decoder, which may be replaced between two drafts.

    Its rows follow those of the target: `cached_len` is the target's, and committing or truncating only ends a draft. A
    draft begins with its first pass after `release_rows`.
    """

    def __init__(self, target: ModelRunner, layers: LayerPlan) -> None:
        self.target = target
        self.layers = layers
        self.decoder = target.decoder
        self.pool = target.pool
        self._backend = target._backend
        self._pending: dict[SeqId, PendingRows] = {}

    def open(self, seq_id: SeqId) -> None:
        """Nothing to set up: a draft begins with its first pass."""

    def close(self, seq_id: SeqId) -> None:
        self._end(self._draft_of(seq_id))

    def cached_len(self, seq_id: SeqId) -> int:
        return self.target.cached_len(seq_id)

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:  # noqa: ARG002
        """The target computes the rows of accepted tokens: the draft ends."""
        self.close(seq_id)

    def truncate(self, seq_id: SeqId, length: int) -> None:  # noqa: ARG002
        self.close(seq_id)

    def release_rows(self) -> None:
        """End all drafts: the target is about to change its rows, and may need the slots."""
        for draft in list(self._pending):
            self._end(draft)

    def plan(self, spans: Sequence[Span]) -> PassPlan:
        drafts = [replace(span, seq_id=self._draft_of(span.seq_id)) for span in spans]
        for span, draft in zip(spans, drafts, strict=True):
            if draft.seq_id not in self._pending:
                self.pool.borrow(draft.seq_id, span.seq_id)
                self._pending[draft.seq_id] = PendingRows()
        plan = super().plan(drafts)
        plan.layers = self.layers
        return plan

    def run(self, plan: PassPlan, token_ids: Tensor | Sequence[int], taps: Sequence[int] = ()) -> PassOutput:
        return self.target.run(plan, token_ids, taps)

    def _draft_of(self, seq_id: SeqId) -> _DraftOf:
        return _DraftOf(seq_id, id(self))

    def _end(self, draft: SeqId) -> None:
        if self._pending.pop(draft, None) is not None:
            self.pool.close(draft)
