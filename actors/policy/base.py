"""What the coordinator asks a pipeline policy, and the answers most policies share."""

from __future__ import annotations

from typing import Protocol

from actors.coordinator.sequence import Sequence
from actors.policy.draft_wait import Costs, Standing


class Pipeline(Protocol):
    """The contract of a policy. It sees lengths and running means, never tensors, sockets or clocks."""

    longest_draft: int
    """Draft tokens that may be ordered for a sequence at most."""
    alternates: bool
    """Whether drafts are also ordered while the target is busy, and who has none sits a pass out."""

    def num_draft_tokens(self, sequence: Sequence) -> int:
        """Draft tokens to order for a sequence that only lacks its root; 0 orders none."""

    def choose(self, expecting: list[Sequence], num_running: int) -> list[Sequence]:
        """Whom of those without a proposal to order drafts for now."""

    def may_verify(self, standing: Standing, costs: Costs) -> bool:
        """Whether a target pass may start now. If not, this is asked again with every record, until patience ends."""


class WholeBatch:
    """Policies that draft for everybody at a time, at most `num_draft_tokens` each."""

    alternates = False

    def __init__(self, num_draft_tokens: int) -> None:
        self.longest_draft = num_draft_tokens

    def num_draft_tokens(self, sequence: Sequence) -> int:
        # The target adds one token of its own behind the path, so the last one is never worth drafting.
        return max(0, min(self.longest_draft, sequence.remaining - 1))

    def choose(self, expecting: list[Sequence], num_running: int) -> list[Sequence]:
        return expecting

    def may_verify(self, standing: Standing, costs: Costs) -> bool:
        return not standing.num_expecting or not costs.worth_waiting(standing)
