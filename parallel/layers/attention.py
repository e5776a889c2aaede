"""Attention of new rows over the pool of KV rows: one function, a backend behind it.

`attend` is the seam for kernels. What a row may see was decided when the pass was planned (`parallel/plan.py`); here
it arrives as views, slots and masks. "sdpa" takes the sequences one by one and is the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kv import KVPool


class AttentionPlan(Protocol):
    """What a backend prepared for one pass, all layers of it."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put the pass's rows k, v [T, kv_heads, head_dim] into their slots."""

    def attend(self, layer: int, q: Tensor, *, windowed: bool) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads * head_dim]."""


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, plan: AttentionPlan, *, windowed: bool = False) -> Tensor:
    """Store k and v, then let every row of q see what the plan shows it: [T, heads * head_dim]."""
    plan.write(layer, k, v)
    return plan.attend(layer, q, windowed=windowed)


@dataclass(slots=True)
class SdpaSpan:
    """Rows of one sequence. `keys[i]`, `values[i]` are views of layer i where the sequence's slots are one run, which
    costs no copy; else the rows at `slots` are gathered. Masks are additive [rows, L], None where every row sees all.
    """

    rows: slice
    keys: tuple[Tensor, ...] | None
    values: tuple[Tensor, ...] | None
    slots: Tensor | None
    mask: Tensor | None
    window_mask: Tensor | None
    causal: bool


class SdpaPlan:
    """Per-sequence scaled dot-product attention."""

    def __init__(
        self, pool: KVPool, spans: list[SdpaSpan], run: range | None, slots: Tensor | None
    ) -> None:
        self._pool = pool
        self._spans = spans
        self._slots = slots
        if run is not None:
            self._new_keys = pool.keys[:, run.start : run.stop].unbind(0)
            self._new_values = pool.values[:, run.start : run.stop].unbind(0)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self._slots is None:
            self._new_keys[layer].copy_(k)
            self._new_values[layer].copy_(v)
        else:
            self._pool.keys[layer].index_copy_(0, self._slots, k)
            self._pool.values[layer].index_copy_(0, self._slots, v)

    def attend(self, layer: int, q: Tensor, *, windowed: bool) -> Tensor:
        if len(self._spans) == 1:
            return self._attend_span(self._spans[0], layer, q, windowed)
        return torch.cat([self._attend_span(span, layer, q[span.rows], windowed) for span in self._spans])

    def _attend_span(self, span: SdpaSpan, layer: int, q: Tensor, windowed: bool) -> Tensor:
        """KV heads are the batch and the queries of a KV head's group its heads: no key is repeated for its group."""
        if span.keys is not None:
            keys, values = span.keys[layer], span.values[layer]  # [L, kv_heads, head_dim]
        else:
            keys = self._pool.keys[layer].index_select(0, span.slots)
            values = self._pool.values[layer].index_select(0, span.slots)
        num_rows, num_heads, head_dim = q.shape
        length, kv_heads, _ = keys.shape
        group = num_heads // kv_heads
        keys, values = keys.transpose(0, 1).unsqueeze(1), values.transpose(0, 1).unsqueeze(1)
        mask = span.window_mask if windowed else span.mask
        if num_rows == 1:
            q = q.view(kv_heads, 1, group, head_dim)
            return F.scaled_dot_product_attention(q, keys, values, mask).view(1, -1)
        q = q.view(num_rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        shape = (kv_heads, group, length, head_dim)
        causal = span.causal and mask is None
        out = F.scaled_dot_product_attention(q, keys.expand(shape), values.expand(shape), mask, is_causal=causal)
        return out.permute(2, 0, 1, 3).reshape(num_rows, -1)
