"""In which order the same verbs are spoken: one file per pipeline policy, and the table of their names.

A policy sees lengths and flags of sequences, never tensors, sockets or clocks. It answers two questions of the
coordinator: how many draft tokens to order for a sequence, and whether the target may go ahead now.
What a drafter prepares while the target verifies is the business of `actors/branches.py`.
"""

from __future__ import annotations

from typing import Protocol

from actors.pipelines.ahead import AheadPipeline
from actors.pipelines.cost import Costs
from actors.pipelines.plain import PlainPipeline
from actors.pipelines.sync import SyncPipeline
from actors.sequence import Sequence


class Pipeline(Protocol):
    """The contract of a policy."""

    def num_draft_tokens(self, sequence: Sequence) -> int:
        """Draft tokens to order for a sequence that only lacks its root; 0 orders none."""

    def may_verify(self, num_expecting: int, num_ready: int, answered: bool, costs: Costs) -> bool:
        """Whether a target pass may start now.

        `num_expecting` sequences still wait for a proposal, `num_ready` have one; `answered` says that the drafter has
        already sent what it had for the present orders.
        """


PIPELINES = {
    "plain": PlainPipeline,
    "sync": SyncPipeline,
    "pearl": AheadPipeline,
    "branches": AheadPipeline,
    "tree": AheadPipeline,
}
