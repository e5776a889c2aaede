"""A limit for the rounds of one role: a round that takes longer is taken to hang.

Arithmetic on batches and answers. Without a measured round there is no limit: the first one may compile, allocate, or
read a prompt on a machine of any speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.protocol.messages import DraftBatch, ProposalBatch, VerdictBatch, VerifyBatch

FLOOR_S = 30.0
"""Part of the limit that does not depend on measured rounds."""
FACTOR = 20.0
"""The other part, in longest rounds so far."""


@dataclass(slots=True)
class RoundTimeout:
    """`longest_s` is the longest round so far, `most_rows` the most tokens of one."""

    longest_s: float = 0.0
    most_rows: int = 0
    _rows: int = 0
    _loads: bool = False

    def ordered(self, batch: VerifyBatch | DraftBatch) -> None:
        """The role was sent this batch; unanswered batches count as the largest of them. Weights may take any time."""
        self._loads = isinstance(batch, VerifyBatch) and batch.weights is not None
        self._rows = max(self._rows, num_rows(batch))

    def answered(self, answer: VerdictBatch | ProposalBatch) -> None:
        if self._loads:
            self._loads, self._rows = False, 0
        if not self._rows:
            return
        self.longest_s = max(self.longest_s, answer.finished - answer.started)
        self.most_rows, self._rows = max(self.most_rows, self._rows), 0

    @property
    def limit_s(self) -> float:
        """Limit of the present round, in proportion if it has more rows than any that was measured."""
        if not self.most_rows or self._loads:
            return math.inf
        return FLOOR_S + FACTOR * self.longest_s * max(1.0, self._rows / self.most_rows)


def num_rows(batch: VerifyBatch | DraftBatch) -> int:
    """Tokens that a batch makes a role read, verify or draft; at least 1."""
    rows = 0
    if isinstance(batch, VerifyBatch):
        for item in batch.items:
            rows += item.num_tokens
            if item.proposal is not None:
                rows += item.proposal.tree.num_draft_tokens
    else:
        for record in (*batch.admits, *batch.commits):
            rows += len(record.token_ids)
        for order in batch.orders:
            rows += order.num_draft_tokens
    return max(1, rows)
