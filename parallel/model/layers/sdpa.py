"""Attention sequence by sequence with torch's scaled dot-product attention: the oracle, and the default on CPU where
there is no kernel (`ragged.py`).

The keys of a sequence whose slots are one run are views of the pool, made once per pass for all layers; other keys are
gathered. Knows no trees and no slot tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kv.pass_plan import SpanRows, TableRead
from parallel.kv.pool import KVPool
from parallel.model.layers.attention import AttentionShape, Heads, PassPlan, PooledPlan, capped_attention
from parallel.model.layers.rope import Rotation
from parallel.model.layers.score_bias import ScoreBias
from parallel.transfers import to_device, upload

_FOLDED_ROWS = 32
"""Up to this many rows the queries of a KV head's group are more rows of that head, so its keys are read once; above
it they are heads."""


@dataclass(slots=True)
class SdpaSpan:
    """Rows of one sequence. With `slots` None its keys are one run and `keys[i]`, `values[i]` are layer i's views
    [kv_heads, 1, L, head_dim]; otherwise the rows at `slots` are gathered. Masks are additive, [group * rows, L] if
    folded and else [rows, L]; None where every row sees all keys, or where `causal` means the same."""

    rows: slice
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    slots: Tensor | None
    mask: Tensor | None
    window_mask: Tensor | None
    folded: bool
    causal: bool


class SdpaPlan(PooledPlan):
    """Attention of `spans`, whose new rows go to the slots `written`."""

    def __init__(self, pool: KVPool, shape: AttentionShape, spans: list[SdpaSpan], written: Tensor) -> None:
        self.pool, self.written_slots = pool, written
        self._shape = shape
        self._spans = spans

    def attend(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> Tensor:
        q, k, v = heads.split(projected, rotation)
        self.write(heads.layer, k, v)
        return torch.cat([self._attend_span(s, heads.layer, q[s.rows], heads.windowed) for s in self._spans])

    def _attend_span(self, span: SdpaSpan, layer: int, q: Tensor, windowed: bool) -> Tensor:
        if span.slots is None:
            keys, values = self.pool.widened(layer, span.keys[layer], span.values[layer])
        else:
            keys, values = (rows.transpose(0, 1).unsqueeze(1) for rows in self.pool.read(layer, span.slots))
        mask = span.window_mask if windowed else span.mask
        return _attended(self._shape, q, keys, values, mask, folded=span.folded, causal=span.causal)


class SdpaReads:
    """Queries over other tables, one after the other."""

    def __init__(self, pool: KVPool, shape: AttentionShape, reads: Sequence[TableRead]) -> None:
        self._pool = pool
        self._shape = shape
        device = pool.keys.device
        self._num_rows = [read.num_rows for read in reads]
        self._tables = [read.run or upload(read.slots, device) for read in reads]

    def read(self, heads: Heads, queries: Tensor) -> Tensor:
        queries = queries.unflatten(1, (heads.num_heads, -1))
        parts = zip(self._tables, queries.split(self._num_rows), strict=True)
        return torch.cat([self._read(table, heads.layer, q) for table, q in parts])

    def _read(self, table: range | Tensor, layer: int, q: Tensor) -> Tensor:
        if not len(table):
            return torch.zeros_like(q).flatten(1)
        if isinstance(table, range):
            rows = [stored[layer, table.start : table.stop] for stored in (self._pool.keys, self._pool.values)]
            rows = self._pool.widened(layer, *rows)
        else:
            rows = self._pool.read(layer, table)
        keys, values = (part.transpose(0, 1).unsqueeze(1) for part in rows)
        return _attended(self._shape, q, keys, values, None, folded=len(q) <= _FOLDED_ROWS)


def _attended(
    shape: AttentionShape,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    folded: bool,
    causal: bool = False,
) -> Tensor:
    """q [T, heads, head_dim] over keys and values [kv_heads, 1, L, head_dim] -> [T, heads * head_dim]. KV heads are the
    batch dimension, so that no key is repeated for the queries of its group."""
    num_rows, num_heads, head_dim = q.shape
    kv_heads, _, length, _ = keys.shape
    group = num_heads // kv_heads
    q = q.view(num_rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if folded:
        q = q.reshape(kv_heads, 1, -1, head_dim)
    else:
        keys, values = (rows.expand(kv_heads, group, length, head_dim) for rows in (keys, values))
    if shape.softcap is None:
        is_causal = causal and mask is None
        out = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=is_causal, scale=shape.scale)
    else:
        out = capped_attention(q, keys, values, mask, shape.scale, shape.softcap)
    if folded:
        out = out.view(kv_heads, group, num_rows, head_dim)
    return out.permute(2, 0, 1, 3).reshape(num_rows, -1)


class SdpaBackend:
    """Plans passes over one pool for a model of one attention shape."""

    def __init__(self, pool: KVPool, shape: AttentionShape) -> None:
        self._pool = pool
        self._shape = shape
        self._device = pool.keys.device

    def plan(self, laid_out: Sequence[SpanRows], wanted: list[int]) -> PassPlan:
        """Build the plan of a pass; `wanted` are the rows whose logits are asked for."""
        positions = [position for rows in laid_out for position in rows.positions()]
        spans = [self._span(rows) for rows in laid_out]
        every_row = len(wanted) == len(positions)
        arrays = [np.array(positions), np.concatenate([rows.written_slots for rows in laid_out])]
        arrays += [] if every_row else [np.array(wanted, dtype=np.int64)]
        places, written, *logit_rows = to_device(arrays, self._device)
        attention = SdpaPlan(self._pool, self._shape, spans, written)
        return PassPlan(len(positions), places, logit_rows[0] if logit_rows else None, attention)

    def plan_reads(self, reads: Sequence[TableRead]) -> SdpaReads:
        """Build the plan of queries over other tables, which write nothing."""
        return SdpaReads(self._pool, self._shape, reads)

    def _span(self, rows: SpanRows) -> SdpaSpan:
        keys = values = ()
        slots = mask = None
        shape = self._shape
        if rows.run is not None:
            first, length = rows.run.start, len(rows.run)
            keys = self._pool.keys.narrow(1, first, length).transpose(1, 2).unsqueeze(2).unbind(0)
            values = self._pool.values.narrow(1, first, length).transpose(1, 2).unsqueeze(2).unbind(0)
        else:
            slots = upload(rows.slots, self._device)
        folded = rows.num_rows <= _FOLDED_ROWS
        chain = rows.pending.is_chain
        causal = chain and not folded and rows.num_rows == len(rows.slots) and shape.softcap is None
        if shape.bias is not None:
            causal, mask = False, self._biased(shape.bias, rows)
        elif not causal and not (chain and rows.num_rows == 1):
            mask = self._mask(rows, None, folded=folded)
        window_mask = mask
        if shape.window is not None and rows.context + max(rows.pending.depths) >= shape.window:
            window_mask = self._mask(rows, shape.window, folded=folded)
        return SdpaSpan(rows.rows, keys, values, slots, mask, window_mask, folded, causal)

    def _biased(self, bias: ScoreBias, rows: SpanRows) -> Tensor:
        """The mask with the bias of every head, [heads, 1, rows, L]: a KV head has one query head."""
        assert self._shape.group == 1, "a bias is of one head"
        keys = np.concatenate((np.arange(rows.context), np.array(rows.pending.depths) + rows.context))
        distances = upload(keys[None] - np.array(rows.positions())[:, None], self._device)
        return (bias.of(distances) + self._mask(rows, None, folded=False))[:, None]

    def _mask(self, rows: SpanRows, window: int | None, *, folded: bool) -> Tensor:
        """Zero where a row sees a key, else minus infinity. A window is a number of positions, not of rows."""
        hidden = np.zeros((rows.num_rows, len(rows.slots)), dtype=bool)
        hidden[:, rows.context :] = ~rows.pending.visible(rows.first_pending)
        if window is not None:
            keys = np.concatenate((np.arange(rows.context), np.array(rows.pending.depths) + rows.context))
            hidden |= keys <= np.array(rows.depth_indices())[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=self._pool.dtype, device=self._device)
        mask.masked_fill_(upload(hidden, self._device, bool), float("-inf"))
        return mask.repeat(self._shape.group, 1) if folded else mask
