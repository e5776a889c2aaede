"""No speculation: every target pass verifies empty proposals. The baseline of everything, and the fallback."""

from __future__ import annotations

from actors.coordinator.sequence import Sequence
from actors.policy.base import WholeBatch
from actors.policy.draft_wait import Costs, Standing


class PlainPipeline(WholeBatch):
    """Never orders a draft, never waits."""

    def num_draft_tokens(self, sequence: Sequence) -> int:
        return 0

    def may_verify(self, standing: Standing, costs: Costs) -> bool:
        return True
