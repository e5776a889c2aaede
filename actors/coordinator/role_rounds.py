"""The rounds of one role, from a batch to its answer: how long one may take, and how long records are on their way.

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
IDLE_S = 2e-4
"""A drafter that starts an order this long after its last pass was idle when the order arrived."""


@dataclass(slots=True)
class RoleRounds:
    """`longest_s` is the longest round so far, `most_rows` the most tokens of one. A round that takes longer than
    `limit_s` is taken to hang."""

    longest_s: float = 0.0
    most_rows: int = 0
    _rows: int = 0
    _loads: bool = False
    _sent: tuple[int, float] = (0, 0.0)  # round of the batch without any answer, and when it left

    def ordered(self, batch: VerifyBatch | DraftBatch, now: float) -> None:
        """The role was sent this batch; unanswered batches count as the largest of them. Weights may take any time."""
        self._sent = batch.round, now
        self._loads = isinstance(batch, VerifyBatch) and batch.weights is not None
        self._rows = max(self._rows, num_rows(batch))

    def answered(self, answer: VerdictBatch | ProposalBatch, now: float) -> float | None:
        """Returns the seconds for which batch and answer were on their way, if that is known: from the first answer to
        a batch, unless this had to wait for a pass of draft-ahead."""
        (round_, sent_at), self._sent = self._sent, (0, 0.0)
        if self._loads:
            self._loads, self._rows = False, 0
        if self._rows:
            self.longest_s = max(self.longest_s, answer.finished - answer.started)
            self.most_rows, self._rows = max(self.most_rows, self._rows), 0
        is_verdict = isinstance(answer, VerdictBatch)
        ahead, left_at = ((), answer.left_at) if is_verdict else (answer.ahead, answer.finished)
        was_idle = not ahead or answer.started - ahead[-1][1] > IDLE_S
        if answer.round != round_ or not was_idle:
            return None
        return max(0.0, now - sent_at - (left_at - answer.started))

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
