"""Draft, then verify, in turn: the whole batch is drafted for, then the whole batch is verified.

Simple and hard to beat on one device; on separate devices each side idles while the other works.
"""

from __future__ import annotations

from actors.pipelines.cost import Costs
from actors.sequence import Sequence


class SyncPipeline:
    """Orders as many tokens as can still be emitted and waits for every proposal."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens

    def num_draft_tokens(self, sequence: Sequence) -> int:
        # The target adds one token of its own behind the path, so the last one is never worth drafting.
        return max(0, min(self._num_draft_tokens, sequence.remaining - 1))

    def may_verify(self, num_expecting: int, num_ready: int, answered: bool, costs: Costs) -> bool:
        return num_expecting == 0
