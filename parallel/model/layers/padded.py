"""Attention of a whole batch as one rectangle: gather, one masked kernel, scatter. The default on CUDA.

The number of kernels does not depend on the batch, and with sizes rounded up to buckets few different shapes occur,
so a pass can be captured as a CUDA graph (`runtime/cuda_graphs.py`). Short spans share a rectangle; a long one (a
prefill chunk) has its own.

    rectangle   B sequences x Q queries against L keys; a sequence's pending keys, its last P, are masked by `tail`
    padding     queries repeat the pass's first row, and keys the first one of their sequence; their results are never
                read, but zero times NaN is NaN: a key of another sequence, or the pool's scratch row, may be none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kv.pass_plan import SpanRows, TableRead, rounded_logit_rows
from parallel.kv.pool import KVPool
from parallel.model.layers.attention import AttentionShape, Heads, PassPlan, PooledPlan, capped_attention, check_window
from parallel.model.layers.rope import Rotation
from parallel.transfers import to_device

_LONG_SPAN = 64
_KEY_BLOCK = 64  # masked kernels need aligned rows


@dataclass(frozen=True, slots=True)
class Rectangle:
    """One masked attention; all tensors int64 but `tail`."""

    query_rows: Tensor  # [B, Q] row of the pass
    places: Tensor  # [rows] index of each of its rows in the flattened rectangle
    slots: Tensor  # [B, L]
    context: Tensor  # [B] committed keys, seen by every query
    depths: Tensor  # [B, P] of the pending keys
    tail: Tensor  # bool [B, Q, P] which pending keys a query sees

    def tensors(self) -> list[Tensor]:
        return [self.query_rows, self.places, self.slots, self.context, self.depths, self.tail]

    def visible(self) -> tuple[Tensor, Tensor]:
        """Which keys a query sees, bool [B, Q, L], and the positions of the keys, [B, L]."""
        num_pending = self.tail.shape[2]
        column = torch.arange(self.slots.shape[1], device=self.slots.device)
        offset = column - self.context[:, None]  # [B, L] index among the pending keys
        inside = offset.clamp(0, num_pending - 1)
        seen = self.tail.gather(2, inside[:, None].expand(-1, self.tail.shape[1], -1))
        pending = (offset >= 0) & (offset < num_pending)
        positions = torch.where(pending, self.context[:, None] + self.depths.gather(1, inside), column)
        return (offset < 0)[:, None] | (seen & pending[:, None]), positions


@dataclass(slots=True)
class PaddedPlan(PooledPlan):
    """A pass as rectangles; `order` sorts their rows into the pass's order where there are several."""

    pool: KVPool
    shape: AttentionShape
    positions: Tensor
    written_slots: Tensor
    rectangles: list[Rectangle]
    order: Tensor | None
    bucketed: bool
    masks: Sequence[tuple[Tensor, Tensor]] = ()

    def tensors(self) -> list[Tensor]:
        """Everything in which bucketed passes of the same shapes differ."""
        return [self.positions, self.written_slots, *self.rectangles[0].tensors()]

    def key(self) -> tuple[object, ...]:
        """What bucketed passes share that are captured as one."""
        return tuple(tensor.shape for tensor in self.tensors())

    def like(self) -> PaddedPlan:
        """The same bucketed pass over tensors of its own."""
        positions, written_slots, *rest = (tensor.clone() for tensor in self.tensors())
        return replace(self, positions=positions, written_slots=written_slots, rectangles=[Rectangle(*rest)])

    def prepare(self) -> None:
        self.masks = [self._masks(rectangle) for rectangle in self.rectangles]

    def attend(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> Tensor:
        q, k, v = heads.split(projected, rotation)
        self.write(heads.layer, k, v)
        parts = [
            _attend_rectangle(self.pool, self.shape, rectangle, heads.layer, q, masks[heads.windowed])
            for rectangle, masks in zip(self.rectangles, self.masks, strict=True)
        ]
        return parts[0] if self.order is None else torch.cat(parts).index_select(0, self.order)

    def _masks(self, rectangle: Rectangle) -> tuple[Tensor, Tensor]:
        """Additive masks [B, 1, group * Q, L]: without and with the sliding window."""
        visible, key_positions = rectangle.visible()
        full = _additive(self.pool, self.shape, visible)
        window = self.shape.window
        if window is None:
            return full, full
        first = self.positions[rectangle.query_rows] - window  # [B, Q]
        return full, _additive(self.pool, self.shape, visible & (key_positions[:, None] > first[:, :, None]))


class PaddedReads:
    """Queries over other tables as one rectangle, whose pending keys no query sees."""

    def __init__(self, pool: KVPool, shape: AttentionShape, rectangle: Rectangle) -> None:
        self._pool, self._shape = pool, shape
        self._rectangle = rectangle
        visible, _ = rectangle.visible()
        self._mask = _additive(pool, shape, visible)
        self._is_read = (rectangle.context > 0)[rectangle.places // rectangle.query_rows.shape[1], None]

    def read(self, heads: Heads, queries: Tensor) -> Tensor:
        queries = queries.unflatten(1, (heads.num_heads, -1))
        read = _attend_rectangle(self._pool, self._shape, self._rectangle, heads.layer, queries, self._mask)
        return torch.where(self._is_read, read, 0)  # not a product: of no keys the kernel's result may be NaN


def _attend_rectangle(
    pool: KVPool, shape: AttentionShape, rectangle: Rectangle, layer: int, q: Tensor, mask: Tensor
) -> Tensor:
    group = shape.group
    batch, length = rectangle.slots.shape
    num_queries = rectangle.query_rows.shape[1]
    head_dim = q.shape[2]
    slots = rectangle.slots.view(-1)
    keys, values = (rows.view(batch, length, -1, head_dim).transpose(1, 2) for rows in pool.read(layer, slots))
    # the queries of a KV head's group are more queries of that head: [B, kv_heads, group * Q, head_dim]
    q = q.index_select(0, rectangle.query_rows.view(-1)).view(batch, num_queries, -1, group, head_dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(batch, -1, group * num_queries, head_dim)
    if shape.softcap is None:
        out = F.scaled_dot_product_attention(q, keys, values, mask, scale=shape.scale)
    else:
        out = capped_attention(q, keys, values, mask, shape.scale, shape.softcap)
    out = out.reshape(batch, -1, group, num_queries, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch * num_queries, -1).index_select(0, rectangle.places)


def _additive(pool: KVPool, shape: AttentionShape, visible: Tensor) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=pool.dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf")).repeat(1, shape.group, 1)[:, None]


class PaddedBackend:
    """Plans passes over one pool; `bucketed` rounds passes of short spans up to powers of two."""

    def __init__(self, pool: KVPool, shape: AttentionShape, *, bucketed: bool = False) -> None:
        self.pool = pool
        self.shape = shape
        self._bucketed = bucketed

    def plan(self, laid_out: Sequence[SpanRows], wanted: list[int]) -> PassPlan:
        """Build the plan of a pass; `wanted` are the rows whose logits are asked for."""
        check_window(self.shape, laid_out)
        short = [rows for rows in laid_out if rows.num_rows <= _LONG_SPAN]
        batches = [short] if short else []
        batches += [[rows] for rows in laid_out if rows.num_rows > _LONG_SPAN]
        bucketed = self._bucketed and len(short) == len(laid_out)
        rectangles = [self._rectangle(batch, bucketed=bucketed) for batch in batches]
        num_rows = sum(rows.num_rows for rows in laid_out)
        num_padded = rectangles[0][0].size if bucketed else num_rows
        positions = np.zeros(num_padded, dtype=np.int64)
        written_slots = np.full(num_padded, self.pool.scratch_slot, dtype=np.int64)
        for rows in laid_out:
            positions[rows.rows] = rows.positions()
            written_slots[rows.rows] = rows.written_slots
        read = np.array(wanted, dtype=np.int64)
        if bucketed:
            rectangles[0][1] = np.pad(rectangles[0][1], (0, num_padded - num_rows))
            read = rounded_logit_rows(wanted, _bucket(len(laid_out)), num_padded)
        order = np.argsort([row for batch in batches for rows in batch for row in range(num_rows)[rows.rows]])
        arrays = [positions, written_slots, read, order]
        tensors = to_device(arrays + [array for arrays in rectangles for array in arrays], self.pool.keys.device)
        positions, written_slots, logit_rows, order, *rest = tensors
        parts = [Rectangle(*rest[i : i + 6]) for i in range(0, len(rest), 6)]
        order = order if len(parts) > 1 else None
        attention = PaddedPlan(self.pool, self.shape, positions, written_slots, parts, order, bucketed)
        if bucketed:
            return PassPlan(num_rows, positions, logit_rows, attention, num_logits=len(wanted))
        return PassPlan(num_rows, positions, None if len(wanted) == num_rows else logit_rows, attention)

    def plan_reads(self, reads: Sequence[TableRead]) -> PaddedReads:
        """Build the plan of queries over other tables, which write nothing."""
        size, num_queries = len(reads), max(read.num_rows for read in reads)
        length = -(-(max(len(read.slots) for read in reads) + 1) // _KEY_BLOCK) * _KEY_BLOCK
        query_rows = np.zeros((size, num_queries), dtype=np.int64)
        slots = np.empty((size, length), dtype=np.int64)
        places, first = [], 0
        for i, read in enumerate(reads):
            query_rows[i, : read.num_rows] = range(first, first + read.num_rows)
            slots[i] = read.slots[0] if len(read.slots) else self.pool.scratch_slot
            slots[i, : len(read.slots)] = read.slots
            places.append(np.arange(i * num_queries, i * num_queries + read.num_rows))
            first += read.num_rows
        context, depths = np.array([len(read.slots) for read in reads]), np.zeros((size, 1), dtype=np.int64)
        arrays = [query_rows, np.concatenate(places), slots, context, depths]
        device = self.pool.keys.device
        query_rows, places, slots, context, depths = to_device(arrays, device)
        unseen = torch.zeros(size, num_queries, 1, dtype=torch.bool, device=device)
        return PaddedReads(self.pool, self.shape, Rectangle(query_rows, places, slots, context, depths, unseen))

    def _rectangle(self, batch: list[SpanRows], *, bucketed: bool) -> list[np.ndarray]:
        """The fields of a Rectangle, in order, on the host."""
        size = len(batch)
        num_queries = max(rows.num_rows for rows in batch)
        num_pending = max(rows.num_pending + rows.room for rows in batch)
        length = -(-max(len(rows.slots) + rows.room for rows in batch) // _KEY_BLOCK) * _KEY_BLOCK
        if bucketed:
            size, num_queries, num_pending, length = map(_bucket, (size, num_queries, num_pending, length))
        query_rows = np.zeros((size, num_queries), dtype=np.int64)
        slots = np.full((size, length), self.pool.scratch_slot, dtype=np.int64)
        context = np.zeros(size, dtype=np.int64)
        depths = np.zeros((size, num_pending), dtype=np.int64)
        tail = np.zeros((size, num_queries, num_pending), dtype=bool)
        tail[:, :, 0] = True  # padding rows see one key: a softmax over no key is NaN
        places = []
        for i, rows in enumerate(batch):
            query_rows[i, : rows.num_rows] = range(rows.first, rows.first + rows.num_rows)
            slots[i] = rows.slots[0]
            slots[i, : len(rows.slots)] = rows.slots
            context[i] = rows.context
            depths[i, : rows.num_pending] = rows.pending.depths
            tail[i, : rows.num_rows, : rows.num_pending] = rows.pending.visible(rows.first_pending)
            places.append(np.arange(i * num_queries, i * num_queries + rows.num_rows))
        return [query_rows, np.concatenate(places), slots, context, depths, tail]


def _bucket(size: int) -> int:
    return 1 << (size - 1).bit_length()
