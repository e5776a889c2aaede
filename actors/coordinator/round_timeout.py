"""How long the rounds of one role take, and from that how long one may take before it is taken never to end.

Plain arithmetic on what is sent and answered. Without a single measured round nothing is known, and nothing is said:
the first one may compile, allocate, or read a prompt on a machine of any speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.protocol.messages import DraftBatch, ProposalBatch, VerdictBatch, VerifyBatch

FLOOR_S = 30.0
"""Any round may take so long."""
FACTOR = 20.0
"""And so many times as long as the longest so far."""


@dataclass(slots=True)
class RoundTimeout:
    """`longest_s` is the longest round so far, `most_rows` the most tokens one had to deal with."""

    longest_s: float = 0.0
    most_rows: int = 0
    _rows: int = 0

    def ordered(self, batch: VerifyBatch | DraftBatch) -> None:
        """The role was sent this; what it has not answered yet may be larger."""
        self._rows = max(self._rows, num_rows(batch))

    def answered(self, answer: VerdictBatch | ProposalBatch) -> None:
        if not self._rows:
            return
        self.longest_s = max(self.longest_s, answer.finished - answer.started)
        self.most_rows, self._rows = max(self.most_rows, self._rows), 0

    @property
    def limit_s(self) -> float:
        """Of a round now: in proportion, if it has more rows than any that was measured."""
        if not self.most_rows:
            return math.inf
        return FLOOR_S + FACTOR * self.longest_s * max(1.0, self._rows / self.most_rows)


def num_rows(batch: VerifyBatch | DraftBatch) -> int:
    """Tokens a batch has to do with, one at least."""
    if isinstance(batch, VerifyBatch):
        drafts = [item.proposal.tree.num_draft_tokens for item in batch.items if item.proposal is not None]
        return max(1, sum(item.num_tokens for item in batch.items) + sum(drafts))
    read = sum(len(one.token_ids) for one in (*batch.admits, *batch.commits))
    return max(1, read + sum(order.num_draft_tokens for order in batch.orders))
