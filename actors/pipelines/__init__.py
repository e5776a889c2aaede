"""In which order the same verbs are spoken: one file per pipeline policy, and the table of their names.

A policy sees lengths and flags of sequences, never tensors, sockets or clocks. It answers two questions of the
coordinator: how many draft tokens to order for a sequence, and whether the target may go ahead now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from actors.pipelines.plain import PlainPipeline
from actors.pipelines.sync import SyncPipeline
from actors.sequence import Sequence


class Pipeline(Protocol):
    """The contract of a policy."""

    def num_draft_tokens(self, sequence: Sequence) -> int:
        """Draft tokens to order for a sequence that only lacks its root; 0 orders none."""

    def may_verify(self, expecting: Iterable[Sequence]) -> bool:
        """Whether a target pass may start although `expecting` still wait for proposals."""


PIPELINES = {"plain": PlainPipeline, "sync": SyncPipeline}
