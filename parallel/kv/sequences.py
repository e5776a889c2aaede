"""The sequences of a pool whose rows stand there as they were fed, and which pending rows hang on which.

Runners over the same rows share one `PooledSequences`; drafts that borrow rows have one of their own over the same
pool. A policy may let passes see some of the committed rows, and drop others. Knows no model and no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from parallel.kv.pass_plan import PendingRows, Span, SpanRows, lay_out
from parallel.kv.pool import KVPool, SeqId
from parallel.kv.prefix_tree import Text


class RowPolicy(Protocol):
    """Which of its committed rows a sequence keeps, and which of them the rows of a pass see."""

    def narrowed(self, rows: SpanRows, span: Span) -> SpanRows:
        """The rows of a pass with what they are to see."""
        ...

    def after_commit(self, seq_id: SeqId) -> None:
        """Drop what is not to be kept."""


class PooledSequences:
    """`pending` has the forest of every open sequence's pending rows, `unread` the tokens of sources that have no rows
    yet."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.pending: dict[SeqId, PendingRows] = {}
        self.unread: dict[SeqId, Sequence[int]] = {}
        self._with_source: set[SeqId] = set()
        self.policy: RowPolicy | None = None

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:
        self.pool.open(seq_id, text)
        self.pending[seq_id] = PendingRows()

    def borrow(self, seq_id: SeqId, owner: SeqId) -> None:
        """Open a sequence behind the committed rows of another (`KVPool.borrow`)."""
        self.pool.borrow(seq_id, owner)
        self.pending[seq_id] = PendingRows()

    def close(self, seq_id: SeqId) -> None:
        self.pool.close(seq_id)
        del self.pending[seq_id]
        if seq_id in self._with_source:
            self._with_source.discard(seq_id)
            self.unread.pop(seq_id, None)
            self.pool.close(_source_of(seq_id))

    def set_source(self, seq_id: SeqId, token_ids: Sequence[int]) -> None:
        """What the rows of an open sequence read beside their own; it is encoded before their first pass."""
        self.pool.open(_source_of(seq_id))
        self.pool.set_source(seq_id, _source_of(seq_id))
        self._with_source.add(seq_id)
        self.unread[seq_id] = token_ids

    def reserve_source(self, seq_id: SeqId) -> tuple[Sequence[int], np.ndarray]:
        """The tokens of a source that has no rows, and the slots for them, which it has from now on."""
        token_ids, source = self.unread.pop(seq_id), _source_of(seq_id)
        slots = self.pool.reserve(source, len(token_ids))
        self.pool.commit(source, range(len(token_ids)))
        return token_ids, slots

    @property
    def num_unread(self) -> int:
        """Rows that sources will take."""
        return sum([len(token_ids) for token_ids in self.unread.values()])

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        """Commit the pending rows `keep`, a path that starts after the committed rows; rows `retain` stay pending."""
        self.pending[seq_id] = self.pending[seq_id].after_commit(keep, retain)
        self.pool.commit(seq_id, keep, retain)
        if self.policy is not None:
            self.policy.after_commit(seq_id)

    def truncate(self, seq_id: SeqId, length: int) -> None:
        self.pool.truncate(seq_id, length)
        self.pending[seq_id] = PendingRows()

    def lay_out(self, spans: Sequence[Span]) -> list[SpanRows]:
        """Reserve the rows of a pass; call `KVPool.can_reserve` first."""
        assert self.pool.can_reserve(sum([span.num_tokens for span in spans])), "call can_reserve before planning"
        laid_out = lay_out(self.pool, self.pending, spans)
        if self.policy is None:
            return laid_out
        return [self.policy.narrowed(rows, span) for rows, span in zip(laid_out, spans, strict=True)]


def _source_of(seq_id: SeqId) -> SeqId:
    return ("source", seq_id)
