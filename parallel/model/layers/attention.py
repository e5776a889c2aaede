"""Attention of new rows over the pool of KV rows: one function, a backend behind it.

`attend` is the seam for kernels. What a row may see was decided when the pass was planned; a backend's plan brings it
as views, slots and masks. Backends: `sdpa.py` takes the sequences one by one and is the oracle, `padded.py` takes
them as one rectangle with a fixed number of kernels.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AttentionPlan(Protocol):
    """What a backend prepared for one pass, all layers of it."""

    def prepare(self) -> None:
        """Derive on the device what all layers share; called once, at the start of the pass."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put the pass's rows k, v [T, kv_heads, head_dim] into their slots."""

    def attend(self, layer: int, q: Tensor, *, windowed: bool) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads * head_dim]."""


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, plan: AttentionPlan, *, windowed: bool = False) -> Tensor:
    """Store k and v, then let every row of q see what the plan shows it: [T, heads * head_dim]."""
    plan.write(layer, k, v)
    return plan.attend(layer, q, windowed=windowed)
