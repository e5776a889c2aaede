"""No speculation: every target pass verifies empty proposals. The baseline of everything, and the fallback."""

from __future__ import annotations

from actors.pipelines.cost import Costs, Standing
from actors.pipelines.policy import WholeBatch
from actors.sequence import Sequence


class PlainPipeline(WholeBatch):
    """Never orders a draft, never waits."""

    def num_draft_tokens(self, sequence: Sequence) -> int:
        return 0

    def may_verify(self, standing: Standing, costs: Costs) -> bool:
        return True
