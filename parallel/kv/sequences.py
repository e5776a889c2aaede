"""The sequences of a pool whose rows stand there as they were fed, and which pending rows hang on which.

Runners over the same rows share one `PooledSequences`; drafts that borrow rows have one of their own over the same
pool. Knows no model and no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.kv.pass_plan import PendingRows, Span, SpanRows, lay_out
from parallel.kv.pool import KVPool, SeqId
from parallel.kv.prefix_tree import Text


class PooledSequences:
    """`pending` has the forest of every open sequence's pending rows."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.pending: dict[SeqId, PendingRows] = {}

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

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        """Commit the pending rows `keep`, a path that starts after the committed rows; rows `retain` stay pending."""
        self.pending[seq_id] = self.pending[seq_id].after_commit(keep, retain)
        self.pool.commit(seq_id, keep, retain)

    def truncate(self, seq_id: SeqId, length: int) -> None:
        self.pool.truncate(seq_id, length)
        self.pending[seq_id] = PendingRows()

    def lay_out(self, spans: Sequence[Span]) -> list[SpanRows]:
        """Reserve the rows of a pass; call `KVPool.can_reserve` first."""
        assert self.pool.can_reserve(sum(span.num_tokens for span in spans)), "call can_reserve before planning"
        return lay_out(self.pool, self.pending, spans)
