"""In which order drafting and verification take place: one class per pipeline, and the table of their names.

What a drafter prepares while the target verifies is decided in `actors/drafters/draft_ahead/tree.py`.

`sync`      draft, then verify, in turn: the whole batch is drafted for, then the whole batch is verified
`pearl`, `branches`, `tree`   the drafter works on while the target verifies; they differ in what it prepares. For the
            coordinator all three are one policy: a draft that was prepared is answered at once, the rest follows
`pingpong`  two halves of the batch in turn: while the target verifies one, the drafter drafts for the other. No outcome
            has to be guessed; it takes at least two requests (MineDraft, arXiv 2603.18016)
`plain`     no speculation: every target pass verifies empty proposals; the baseline and the fallback
"""

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


class PlainPipeline(WholeBatch):
    """Never orders a draft, never waits."""

    def num_draft_tokens(self, sequence: Sequence) -> int:
        return 0

    def may_verify(self, standing: Standing, costs: Costs) -> bool:
        return True


class SyncPipeline(WholeBatch):
    """Orders as many tokens as can still be emitted and waits for all proposals, which come at once."""


class AheadPipeline(WholeBatch):
    """Orders drafts like `sync`; a miss never stalls the rest for longer than it is worth."""


class PingpongPipeline(WholeBatch):
    """Orders drafts for half of those who have none, also while the target is busy with the rest."""

    alternates = True

    def choose(self, expecting: list[Sequence], num_running: int) -> list[Sequence]:
        return expecting[: (num_running + 1) // 2]

    def may_verify(self, standing: Standing, costs: Costs) -> bool:
        return standing.num_ready > 0 or not standing.num_expecting or not costs.worth_waiting(standing)


PIPELINES: dict[str, type[Pipeline]] = {
    "plain": PlainPipeline,
    "sync": SyncPipeline,
    "pearl": AheadPipeline,
    "branches": AheadPipeline,
    "tree": AheadPipeline,
    "pingpong": PingpongPipeline,
}
