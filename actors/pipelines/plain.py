"""No speculation: every target pass verifies empty proposals. The baseline of everything, and the fallback."""

from __future__ import annotations

from actors.pipelines.cost import Costs
from actors.sequence import Sequence


class PlainPipeline:
    """Never orders a draft, never waits."""

    def __init__(self, num_draft_tokens: int) -> None:
        del num_draft_tokens  # every policy is built alike

    def num_draft_tokens(self, sequence: Sequence) -> int:
        return 0

    def may_verify(self, num_expecting: int, num_ready: int, answered: bool, costs: Costs) -> bool:
        return True
