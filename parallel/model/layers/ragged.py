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
from parallel.model.layers.attention import AttentionShape, Heads, PassPlan, PooledPlan
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.rope import Rotation


class RaggedPlan(PooledPlan):
    """The rows of a pass, or queries over other tables, as the kernel takes them."""

    def __init__(self, backend: RaggedBackend, rows: PassRows, last_position: int = 0) -> None:
        self.pool = backend.pool
        self._backend = backend
        self.rows = rows
        self.last_position = last_position
        """The largest of any row."""

    @property
    def written_slots(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  (made where it is asked for)
        return self.rows.written

    def attend(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> Tensor:
        return self._backend.layer_call(heads).attend(self.rows, projected, rotation)

    def read(self, heads: Heads, queries: Tensor) -> Tensor:
        return self._backend.layer_call(heads, reads=True).read(self.rows, queries)


class _SlotTables:
    """The slots of those sequences that are no run, one after the other."""

    def __init__(self) -> None:
        self.tables: list[np.ndarray] = []
        self._size = 0

    def add(self, rows: SpanRows | TableRead) -> tuple[int, int]:
        """The first slot of a run, and where the slots begin among all; -1 for the one that is not so."""
        if rows.run is not None:
            return rows.run.start, -1
        self.tables.append(rows.slots)
        self._size += len(rows.slots)
        return -1, self._size - len(rows.slots)


class RaggedBackend:
    """Plans passes over one pool for a model of one attention shape."""

    def __init__(self, pool: KVPool, shape: AttentionShape) -> None:
        self.pool = pool
        self._shape = shape
        self._calls: dict[tuple[int, bool], LayerCall] = {}  # by layer, and whether it reads other tables

    @staticmethod
    def runs(pool: KVPool) -> bool:
        """Whether this backend can serve the pool on this machine."""
        keys = pool.keys
        return keys.device.type == "cpu" and takes_heads(keys.dtype, keys.shape[-1]) and has_attention()

    def plan(self, laid_out: Sequence[SpanRows], wanted: list[int]) -> PassPlan:
        """Build the plan of a pass; `wanted` are the rows whose logits are asked for."""
        spans: list[int] = []
        parents: list[int] = []
        written: list[int] = []
        positions: list[int] = []
        tables, num_rows, last = _SlotTables(), 0, 0
        for rows in laid_out:
            pending, size = rows.pending, rows.num_rows
            first_of_parents, common = CHAIN, FOREST
            if pending.is_chain:
                places = rows.positions()
                last = max(last, places[-1])
            else:
                first_of_parents, places = len(parents), rows.positions()
                last = max(last, *places)
                if isinstance(pending, RangedRows):
                    common = pending.num_common
                    parents += chain.from_iterable(pending.ranges())
                else:
                    parents += pending.parents
            spans += (num_rows, size, rows.context, rows.num_pending, *tables.add(rows), first_of_parents, common)
            num_rows += size
            written += _written(rows)
            positions += places
        made = PassRows(spans, tables.tables, parents, written, positions)
        # from arrays, not lists: that takes PyTorch three times as long
        logit_rows = None if len(wanted) == num_rows else torch.from_numpy(np.array(wanted, dtype=np.int64))
        return PassPlan(num_rows, made.positions, logit_rows, RaggedPlan(self, made, last))

    def chain_rows(self, laid_out: Sequence[SpanRows], num_steps: int) -> ChainRows:
        """The rows of passes of a chain: the first one feeds those of `laid_out` but the last `num_steps` - 1 of each
        sequence, of which every other one feeds the next."""
        assert all(rows.pending.is_chain for rows in laid_out)
        tables, later = _SlotTables(), num_steps - 1
        first, second = ChainPass([], [], []), ChainPass([], [], [])
        broken: dict[int, Sequence[int]] = {}
        for i, rows in enumerate(laid_out):
            starts, slots, positions = tables.add(rows), _written(rows), rows.positions()
            size, num_pending = rows.num_rows - later, rows.num_pending - later
            first.spans.extend((len(first.written), size, rows.context, num_pending, *starts, CHAIN, FOREST))
            first.written.extend(slots[:size])
            first.positions.extend(positions[:size])
            if later:
                second.spans.extend((i, 1, rows.context, num_pending + 1, *starts, CHAIN, FOREST))
                second.written.append(slots[size])
                second.positions.append(positions[size])
                if rows.run is None:
                    broken[i] = slots[size:]
        return ChainRows(first, second, later, tables.tables, broken)

    def any_plan(self, layers: Iterable[Heads], *, reads: bool = False) -> RaggedPlan:
        """A plan of no rows, to record the calls of these layers with."""
        for heads in layers:
            self.layer_call(heads, reads=reads)
        return RaggedPlan(self, PassRows((), (), (), ()))

    def plan_reads(self, reads: Sequence[TableRead]) -> RaggedPlan:
        """Build the plan of queries over other tables, which write nothing."""
        spans, tables, num_rows = list[int](), _SlotTables(), 0
        for read in reads:
            starts = *tables.add(read), READS
            spans += (num_rows, read.num_rows, len(read.slots), 0, *starts, FOREST)
            num_rows += read.num_rows
        return RaggedPlan(self, PassRows(spans, tables.tables, (), ()))

    def layer_call(self, heads: Heads, *, reads: bool = False) -> LayerCall:
        """The call of a layer's attention, or the one that reads other tables, to which no window and no bias apply."""
        call = self._calls.get((heads.layer, reads))
        if call is None:
            shape = replace(self._shape, window=None, bias=None) if reads else self._shape
            call = self._calls[heads.layer, reads] = self._make_call(heads, shape)
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


def _written(rows: SpanRows) -> Sequence[int]:
    """The slots of the rows that a span feeds."""
    if rows.run is None:
        return rows.written_slots.tolist()
    return range(rows.run.stop - rows.num_rows, rows.run.stop)
