"""Attention of new rows over the pool of KV rows: one function, a backend behind it.

`attend` is the seam for kernels. What a row may see was decided when the pass was planned; a backend's plan brings it
as views, slots and masks. Backends: `sdpa.py` takes the sequences one by one and is the oracle, `padded.py` takes
them as one rectangle with a fixed number of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.kv.pass_plan import AttentionPlan


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all attention layers of a model share: `group` query heads per KV head, the sliding window of the layers
    that have one, the factor of the scores (None: 1/sqrt(head_dim)) and the bound on them (None: unbounded)."""

    group: int
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, plan: AttentionPlan, *, windowed: bool = False) -> Tensor:
    """Store k and v, then let every row of q see what the plan shows it: [T, heads * head_dim]."""
    plan.write(layer, k, v)
    return plan.attend(layer, q, windowed=windowed)


def capped_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None, softcap: float
) -> Tensor:
    """`scaled_dot_product_attention` with scores bounded by softcap * tanh(score / softcap); softmax in float32."""
    scores = q @ keys.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ values
