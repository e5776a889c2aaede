"""Two halves of the batch in turn: while the target verifies one, the drafter drafts for the other.

No outcome has to be guessed, so nothing is wasted; it takes at least two requests, and it pays where two half passes
cost little more than a whole one. With a single request it is `sync`. Source: MineDraft (arXiv 2603.18016).
"""

from __future__ import annotations

from actors.coordinator.sequence import Sequence
from actors.policy.base import WholeBatch
from actors.policy.draft_wait import Costs, Standing


class PingpongPipeline(WholeBatch):
    """Orders drafts for half of those who have none, also while the target is busy with the rest."""

    alternates = True

    def choose(self, expecting: list[Sequence], num_running: int) -> list[Sequence]:
        return expecting[: (num_running + 1) // 2]

    def may_verify(self, standing: Standing, costs: Costs) -> bool:
        return standing.num_ready > 0 or not standing.num_expecting or not costs.worth_waiting(standing)
