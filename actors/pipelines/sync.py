"""Draft, then verify, in turn: the whole batch is drafted for, then the whole batch is verified.

Simple and hard to beat on one device; on separate devices each side idles while the other works.
"""

from __future__ import annotations

from actors.pipelines.cost import Costs
from actors.pipelines.policy import WholeBatch


class SyncPipeline(WholeBatch):
    """Orders as many tokens as can still be emitted and waits for every proposal."""

    def may_verify(self, num_expecting: int, num_ready: int, answered: bool, costs: Costs) -> bool:
        return num_expecting == 0
