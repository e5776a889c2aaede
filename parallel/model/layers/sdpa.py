"""Attention sequence by sequence with torch's scaled dot-product attention: the default on CPU, and the oracle.

A sequence whose slots are one run is attended through views of the pool, without any copy; views of all layers are
made once per pass. Knows nothing of how rows came to be where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kv.pass_plan import Plan, SpanRows
from parallel.kv.pool import KVPool

_FOLDED_ROWS = 32
"""Up to here the queries of a KV head's group stand as more rows, which reads its keys once; above, as heads."""


@dataclass(slots=True)
class SdpaSpan:
    """Rows of one sequence. `keys[i]`, `values[i]` are layer i's views [kv_heads, 1, L, head_dim] of a sequence that is
    one run; of any other the rows at `slots` are gathered. Masks are additive, [group * rows, L] if folded and else
    [rows, L]; None where every row sees all, or where `causal` says the same."""

    rows: slice
    keys: tuple[Tensor, ...] | None
    values: tuple[Tensor, ...] | None
    slots: Tensor | None
    mask: Tensor | None
    window_mask: Tensor | None
    folded: bool
    causal: bool


class SdpaPlan:
    """Writes to `run` where the pass's rows are one run of slots, else to `slots`."""

    def __init__(self, pool: KVPool, spans: list[SdpaSpan], run: range | None, slots: Tensor | None) -> None:
        self._pool = pool
        self._spans = spans
        self._slots = slots
        if run is not None:
            self._new_keys = pool.keys.narrow(1, run.start, len(run)).unbind(0)
            self._new_values = pool.values.narrow(1, run.start, len(run)).unbind(0)

    def prepare(self) -> None:
        """Everything was prepared with the plan."""

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
        """KV heads stand as the batch, so that no key is repeated for the queries of its group."""
        if span.keys is not None:
            keys, values = span.keys[layer], span.values[layer]
        else:
            keys = self._pool.keys[layer].index_select(0, span.slots).transpose(0, 1).unsqueeze(1)
            values = self._pool.values[layer].index_select(0, span.slots).transpose(0, 1).unsqueeze(1)
        mask = span.window_mask if windowed else span.mask
        num_rows, num_heads, head_dim = q.shape
        kv_heads, _, length, _ = keys.shape
        group = num_heads // kv_heads
        q = q.view(num_rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        if span.folded:
            out = F.scaled_dot_product_attention(q.reshape(kv_heads, 1, -1, head_dim), keys, values, mask)
            out = out.view(kv_heads, group, num_rows, head_dim)
        else:
            keys, values = (rows.expand(kv_heads, group, length, head_dim) for rows in (keys, values))
            out = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=span.causal and mask is None)
        return out.permute(2, 0, 1, 3).reshape(num_rows, -1)


class SdpaBackend:
    """`group` query heads share a KV head; `window` is the sliding window of the layers that have one."""

    def __init__(self, pool: KVPool, group: int, window: int | None, dtype: torch.dtype) -> None:
        self._pool = pool
        self._group = group
        self._window = window
        self._dtype = dtype
        self._device = pool.keys.device

    def plan(self, laid_out: Sequence[SpanRows], wanted: list[int]) -> Plan:
        """Lay a pass out; `wanted` are the rows that want logits."""
        positions = [position for rows in laid_out for position in rows.positions()]
        spans = [self._span(rows) for rows in laid_out]
        if len(laid_out) == 1 and laid_out[0].run is not None:
            attention = SdpaPlan(self._pool, spans, laid_out[0].run[-laid_out[0].num_rows :], None)
        else:
            slots = torch.from_numpy(np.concatenate([rows.written_slots for rows in laid_out])).to(self._device)
            attention = SdpaPlan(self._pool, spans, None, slots)
        every_row = len(wanted) == len(positions)
        logit_rows = None if every_row else torch.tensor(wanted, dtype=torch.int64, device=self._device)
        return Plan(len(positions), torch.tensor(positions, device=self._device), logit_rows, attention)

    def _span(self, rows: SpanRows) -> SdpaSpan:
        keys = values = slots = mask = None
        if rows.run is not None:
            first, length = rows.run.start, len(rows.run)
            keys = self._pool.keys.narrow(1, first, length).transpose(1, 2).unsqueeze(2).unbind(0)
            values = self._pool.values.narrow(1, first, length).transpose(1, 2).unsqueeze(2).unbind(0)
        else:
            slots = torch.tensor(rows.slots, device=self._device)
        folded = rows.num_rows <= _FOLDED_ROWS
        chain = rows.pending.is_chain
        causal = chain and not folded and rows.num_rows == len(rows.slots)
        if not causal and not (chain and rows.num_rows == 1):
            mask = self._mask(rows, None, folded=folded)
        window_mask = mask
        if self._window is not None and rows.context + max(rows.pending.depths) >= self._window:
            window_mask = self._mask(rows, self._window, folded=folded)
        return SdpaSpan(rows.rows, keys, values, slots, mask, window_mask, folded, causal)

    def _mask(self, rows: SpanRows, window: int | None, *, folded: bool) -> Tensor:
        """Zero where a row sees a key, minus infinity where not. A window counts positions, not rows."""
        hidden = torch.from_numpy(~rows.pending.visible(rows.first_pending))
        mask = torch.zeros(rows.num_rows, len(rows.slots), dtype=self._dtype)
        mask[:, rows.context :].masked_fill_(hidden, float("-inf"))
        if window is not None:
            keys = torch.cat((torch.arange(rows.context), torch.tensor(rows.pending.depths) + rows.context))
            mask.masked_fill_(keys <= torch.tensor(rows.positions())[:, None] - window, float("-inf"))
        return (mask.repeat(self._group, 1) if folded else mask).to(self._device)
