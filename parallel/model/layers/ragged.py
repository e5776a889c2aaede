"""Attention of all sequences in one call per layer, on CPU in float32 and bfloat16: the default there.

The kernel (`parallel/kernels/attention.cpp`) also normalises and rotates queries and keys and stores the new rows. It
reads keys where they are: no gathering, no mask, no padding. A row's result is the same to the bit alone, in a batch,
in a tree and in a chain. Knows no weights but those of the norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.attention import (
    CHAIN,
    FOREST,
    READS,
    ChainPass,
    ChainRows,
    LayerCall,
    PassRows,
    has_attention,
    takes_heads,
)
from parallel.kv.pass_plan import RangedRows, SpanRows, TableRead
from parallel.kv.pool import KVPool
from parallel.model.layers.attention import AttentionShape, Heads, PassPlan
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.rope import Rotation


class RaggedPlan:
    """The rows of a pass, as the kernel takes them."""

    def __init__(self, backend: RaggedBackend, rows: PassRows, last_position: int = 0) -> None:
        self._backend = backend
        self._rows = rows
        self.last_position = last_position
        """The largest of any row."""

    @property
    def address(self) -> int:
        """Where the kernel finds the rows."""
        return self._rows.address

    def prepare(self) -> None:
        """Nothing to do: layers share the plan's arrays."""

    def attend(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> Tensor:
        return self._backend.layer_call(heads).attend(self._rows, projected, rotation)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._backend.pool.write(layer, self._rows.written, k, v)

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._backend.pool.read(layer, self._rows.written)


class RaggedReads:
    """Queries over other tables, as the kernel takes them."""

    def __init__(self, backend: RaggedBackend, rows: PassRows) -> None:
        self._backend = backend
        self._rows = rows

    @property
    def address(self) -> int:
        """Where the kernel finds the rows."""
        return self._rows.address

    def read(self, heads: Heads, queries: Tensor) -> Tensor:
        return self._backend.reading_call(heads).read(self._rows, queries)


class RaggedBackend:
    """Plans passes over one pool for a model of one attention shape."""

    def __init__(self, pool: KVPool, shape: AttentionShape) -> None:
        self.pool = pool
        self._shape = shape
        self._calls: dict[int, LayerCall] = {}
        self._reading_calls: dict[int, LayerCall] = {}

    @staticmethod
    def runs(pool: KVPool) -> bool:
        """Whether this backend can serve the pool on this machine."""
        keys = pool.keys
        return keys.device.type == "cpu" and takes_heads(keys.dtype, keys.shape[-1]) and has_attention()

    def plan(self, laid_out: Sequence[SpanRows], wanted: list[int]) -> PassPlan:
        """Build the plan of a pass; `wanted` are the rows whose logits are asked for."""
        spans: list[int] = []
        slots: list[np.ndarray] = []
        parents: list[int] = []
        written: list[int] = []
        positions: list[int] = []
        num_slots = num_rows = 0
        for rows in laid_out:
            size = rows.num_rows
            first_slot, first_of_slots, first_of_parents, common = -1, -1, CHAIN, FOREST
            if rows.run is not None:
                first_slot = rows.run.start
                written += range(rows.run.stop - size, rows.run.stop)
            else:
                first_of_slots = num_slots
                num_slots += len(rows.slots)
                slots.append(rows.slots)
                written += rows.written_slots.tolist()
            if isinstance(rows.pending, RangedRows):
                first_of_parents, common = len(parents), rows.pending.num_common
                parents += chain.from_iterable(rows.pending.ranges())
            elif not rows.pending.is_chain:
                first_of_parents = len(parents)
                parents += rows.pending.parents
            starts = first_slot, first_of_slots, first_of_parents
            spans += (num_rows, size, rows.context, rows.num_pending, *starts, common)
            num_rows += size
            positions += rows.positions()
        tables = np.concatenate(slots) if slots else None
        plan = RaggedPlan(self, PassRows(spans, tables, parents, written), max(positions))
        # from arrays, not lists: that takes PyTorch three times as long
        logit_rows = None if len(wanted) == num_rows else torch.from_numpy(np.array(wanted, dtype=np.int64))
        return PassPlan(num_rows, torch.from_numpy(np.array(positions)), logit_rows, plan)

    def chain_rows(self, laid_out: Sequence[SpanRows], num_steps: int) -> ChainRows:
        """The rows of passes of a chain: the first one feeds those of `laid_out` but the last `num_steps` - 1 of each
        sequence, of which every other one feeds the next."""
        assert all(rows.pending.is_chain for rows in laid_out)
        tables: list[np.ndarray] = []
        num_slots, later = 0, num_steps - 1
        passes = [ChainPass([], [], []) for _ in range(num_steps)]
        for i, rows in enumerate(laid_out):
            starts, size = (-1, num_slots), rows.num_rows - later
            if rows.run is not None:
                starts, slots = (rows.run.start, -1), range(rows.run.stop - rows.num_rows, rows.run.stop)
            else:
                num_slots += len(rows.slots)
                tables.append(rows.slots)
                slots = rows.written_slots.tolist()
            positions, num_pending = rows.positions(), rows.num_pending - later
            for step, one in enumerate(passes):
                own = slice(size + step - 1, size + step) if step else slice(size)
                first, num_own = (i, 1) if step else (len(one.written), size)
                one.spans.extend((first, num_own, rows.context, num_pending + step, *starts, CHAIN, FOREST))
                one.written.extend(slots[own])
                one.positions.extend(positions[own])
        return ChainRows(passes, np.concatenate(tables) if tables else None)

    def any_plan(self, layers: Iterable[Heads]) -> RaggedPlan:
        """A plan of no rows, to record the calls of these layers with."""
        for heads in layers:
            self.layer_call(heads)
        return RaggedPlan(self, PassRows((), None, (), ()))

    def any_reads(self, layers: Iterable[Heads]) -> RaggedReads:
        """The same of queries over other tables."""
        for heads in layers:
            self.reading_call(heads)
        return RaggedReads(self, PassRows((), None, (), ()))

    def plan_reads(self, reads: Sequence[TableRead]) -> RaggedReads:
        """Build the plan of queries over other tables, which write nothing."""
        spans: list[int] = []
        slots: list[np.ndarray] = []
        num_slots = num_rows = 0
        for read in reads:
            first_slot, first_of_slots = (-1, num_slots) if read.run is None else (read.run.start, -1)
            if read.run is None:
                num_slots += len(read.slots)
                slots.append(read.slots)
            starts = first_slot, first_of_slots, READS
            spans += (num_rows, read.num_rows, len(read.slots), 0, *starts, FOREST)
            num_rows += read.num_rows
        tables = np.concatenate(slots) if slots else None
        return RaggedReads(self, PassRows(spans, tables, (), ()))

    def layer_call(self, heads: Heads) -> LayerCall:
        call = self._calls.get(heads.layer)
        if call is None:
            call = self._calls[heads.layer] = self._make_call(heads, self._shape)
        return call

    def reading_call(self, heads: Heads) -> LayerCall:
        call = self._reading_calls.get(heads.layer)
        if call is None:
            shape = replace(self._shape, window=None, bias=None)
            call = self._reading_calls[heads.layer] = self._make_call(heads, shape)
        return call

    def _make_call(self, heads: Heads, shape: AttentionShape) -> LayerCall:
        norms, eps, offset = None, 0.0, 0.0
        if heads.norms is not None:
            q_norm, k_norm = heads.norms
            assert isinstance(q_norm, RMSNorm), "the norms of heads are RMS norms"
            norms, eps, offset = (q_norm.weight, k_norm.weight), q_norm.eps, q_norm.offset
        return LayerCall(
            self.pool.keys[heads.layer],
            self.pool.values[heads.layer],
            heads.num_heads,
            scale=heads.head_dim**-0.5 if shape.scale is None else shape.scale,
            window=(shape.window or 0) if heads.windowed else 0,
            softcap=shape.softcap or 0.0,
            norms=norms,
            norm_eps=eps,
            norm_offset=offset,
            bias=shape.bias and shape.bias.by_distance(),
        )
