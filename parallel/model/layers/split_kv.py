"""Attention by Triton's kernels over the slots of the pool: the default on CUDA where Triton is installed.

A plan cuts the rows of a pass into tiles and the keys of long sequences into items (`kernels/triton_attention.py`) of
equal size, as many as fill the device. Queries and keys are normalised and rotated, keys and values stored, by one
kernel in front. Nothing is gathered and no mask is made, so that a pass costs what its own keys cost, whatever the
longest context beside them.

`bucketed` rounds rows and items up: then passes of few different shapes occur, which depend on the powers of two that
hold the sequences and the rows of the longest span, on all rows as `rounded_rows` gives them, and not on the contexts,
and a pass can be captured as a CUDA graph.

Parts of prompts go to PyTorch's flash kernels where these can read their keys (`flash.py`); the plan decides it.

`invariant` gives each row the same bits whatever else is in the pass: keys are cut at multiples of FIXED_KEYS, tiles
have one size, and a row of a tree reads its ancestors as a chain's row does (`triton_attention`, PATHS).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.attention_tiles import KeyTiles, num_warps
from parallel.kernels.triton_launch import INTERPRETS, block_size, launch, runs_on
from parallel.kv.pass_plan import SpanRows, TableRead, rounded_logit_rows
from parallel.kv.pool import KVPool
from parallel.kv.rounded_rows import rounded_rows
from parallel.kv.slot_mirror import SlotMirror, TableOrPart
from parallel.model.layers.attention import AttentionShape, Heads, PassPlan, PooledPlan, check_window
from parallel.model.layers.flash import FlashSpan, flash_runs, takes_flash
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.rope import Rotation
from parallel.transfers import to_device

_LARGEST_TILE = 64
FIXED_KEYS = 512
"""Keys in a range of an invariant pass; a multiple of all tiles of keys. Fewer fill the device with one sequence, more
leave less to be merged. Not measured."""
_LONG_SPAN = 64
"""Passes with a longer span, a part of a prompt, are not rounded up."""
_PROGRAMS_PER_PROCESSOR = 2
"""Items and KV heads at a time for each of the device's processors: twice as many take 1.1 to 1.8 times as long on an
H100, since each leaves a result to be merged."""
_PENDING_PER_ROW = 8
"""Room in a captured pass for the words and depths of pending rows, for each row of it: trees of some levels."""
_FEW_PROCESSORS = 4  # where the device does not say
_MERGED_AT_ONCE = 16
_BEGIN, _END, _WHOLE, _LIMIT, _PARTIAL = 2, 3, 4, 5, 11
"""Fields of an item (`triton_attention.FIELDS`) that change from item to item of a tile, or with the text's length."""
_NUM_FIELDS = 12
_FP8_CAPABILITY = 8, 9
"""The first compute capability for which Triton converts to and from FP8."""


@dataclass(slots=True)
class SplitKVPlan(PooledPlan):
    """A pass as work items. `rows` [T, 3] say where the parts of a row's result are; `num_partials` is their number.
    The rows of `prompts` are in no item. After `attend`, `lse` [T, heads] holds the log-sum-exps of the layer's scores
    if `wants_lse`."""

    backend: SplitKVBackend
    pool: KVPool
    positions: Tensor
    written_slots: Tensor
    items: Tensor
    rows: Tensor
    words: Tensor
    depths: Tensor
    block_m: int
    num_partials: int
    bucketed: bool
    prompts: Sequence[FlashSpan] = ()
    wants_lse: bool = False
    lse: Tensor | None = None
    _partial: tuple[Tensor, Tensor] | None = None

    def tensors(self) -> list[Tensor]:
        """Everything in which bucketed passes of the same shapes differ."""
        return [self.positions, self.written_slots, self.items, self.rows, self.words, self.depths]

    def key(self) -> tuple[object, ...]:
        """What bucketed passes share that are captured as one."""
        return (self.block_m, *(tensor.shape for tensor in self.tensors()))

    def like(self) -> SplitKVPlan:
        """The same bucketed pass over tensors of its own."""
        names = ("positions", "written_slots", "items", "rows", "words", "depths")
        return replace(self, **dict(zip(names, (tensor.clone() for tensor in self.tensors()), strict=True)))

    def prepare(self) -> None:
        """Room for the results of items, which all layers share."""
        if self.num_partials:
            pool, group = self.pool, self.block_m
            shape = self.num_partials, pool.keys.shape[2], group, pool.keys.shape[3]
            partial = torch.empty(shape, dtype=torch.float32, device=pool.keys.device)
            self._partial = partial, torch.empty(shape[:3], dtype=torch.float32, device=pool.keys.device)

    def attend(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> Tensor:
        self._store(heads, projected, rotation)
        return self._attend(heads, projected)

    def read(self, heads: Heads, queries: Tensor) -> Tensor:
        """Attends as a plan of `plan_reads`: [T, num_heads * head_dim] -> as many."""
        return self._attend(replace(heads, windowed=False), queries)

    def _store(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> None:
        from parallel.kernels.triton_rows import store_heads

        pool = self.pool
        keys, values = pool.keys[heads.layer], pool.values[heads.layer]
        cos, sin = (projected, projected) if rotation is None else rotation
        q_norm, k_norm, eps, offset = projected, projected, 0.0, 0.0
        if heads.norms is not None:
            first, second = heads.norms
            assert isinstance(first, RMSNorm), "the norms of heads are RMS norms"
            q_norm, k_norm, eps, offset = first.weight, second.weight, first.eps, first.offset
        changes_queries = rotation is not None or heads.norms is not None
        half = heads.head_dim // 2
        launch(
            store_heads,
            (len(projected), 2 * heads.num_kv_heads + (heads.num_heads if changes_queries else 0)),
            projected,
            cos,
            sin,
            q_norm,
            k_norm,
            keys,
            values,
            self.written_slots,
            projected.stride(0),
            keys.stride(0),
            eps,
            *pool.scales[heads.layer],
            NUM_HEADS=heads.num_heads,
            NUM_KV_HEADS=heads.num_kv_heads,
            HALF=half,
            BLOCK=block_size(half, 1),
            NORMS=heads.norms is not None,
            PLUS_ONE=offset == 1.0,
            ROTATES=rotation is not None,
            FP8=pool.is_fp8,
            num_warps=1,
        )

    def _attend(self, heads: Heads, queries: Tensor) -> Tensor:
        from parallel.kernels.triton_attention import attend_items, merge_items

        backend, pool, head_dim = self.backend, self.pool, heads.head_dim
        keys, values = pool.keys[heads.layer], pool.values[heads.layer]
        key_scale, value_scale = pool.scales[heads.layer]
        out = queries.new_empty(len(queries), heads.num_heads * head_dim)
        lse = torch.empty(len(queries), heads.num_heads, device=out.device) if self.wants_lse else None
        partial, partial_lse = (out, out) if self._partial is None else self._partial
        shape, window = backend.shape, backend.shape.window if heads.windowed else None
        result = out, out if lse is None else lse
        options = dict(
            GROUP=heads.num_heads // heads.num_kv_heads,
            D=head_dim,
            BLOCK_M=self.block_m,
            BLOCK_D=block_size(head_dim),
            WANTS_LSE=lse is not None,
        )
        launch(
            attend_items,
            (len(self.items), heads.num_kv_heads),
            queries,
            keys,
            values,
            *result,
            partial,
            partial_lse,
            self.items,
            backend.mirror.tables,
            self.positions,
            self.words,
            self.depths,
            queries.stride(0),
            keys.stride(0),
            (head_dim**-0.5 if shape.scale is None else shape.scale) * key_scale,
            value_scale,
            shape.softcap or 0.0,
            window or 0,
            WINDOWED=bool(window),
            PATHS=backend.invariant,
            CAPPED=shape.softcap is not None,
            BLOCK_N=backend.tiles.block_n,
            PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",  # without effect on 16-bit products
            WIDEN=INTERPRETS and out.dtype == torch.bfloat16,  # the interpreter has no such products
            **options,
            num_warps=num_warps(self.block_m, head_dim),
            num_stages=backend.tiles.num_stages,
        )
        if self.num_partials:
            grid = (len(queries), heads.num_heads)
            launch(merge_items, grid, partial, partial_lse, self.rows, *result, BLOCK_P=_MERGED_AT_ONCE, **options)
        self.lse = lse
        assert not (self.prompts and self.wants_lse), "flash kernels are asked for no sums"
        for span in self.prompts:
            out[span.rows] = span.attend(pool, heads, queries, shape.scale)
        return out


class SplitKVBackend:
    """Plans passes over one pool for a model of one attention shape; `num_bytes_sent` counts what plans send. `flash`:
    whether parts of prompts may go to PyTorch's kernels, by default where they run and rows need not be invariant."""

    def __init__(
        self,
        pool: KVPool,
        shape: AttentionShape,
        *,
        bucketed: bool = False,
        invariant: bool = False,
        flash: bool | None = None,
    ) -> None:
        self.pool = pool
        self.invariant = invariant
        self.flash = flash_runs(pool) and not invariant if flash is None else flash
        self.shape = shape
        self.mirror = SlotMirror(pool)
        self.num_bytes_sent = 0
        self._bucketed = bucketed
        _, _, num_kv_heads, head_dim = pool.keys.shape
        item_bytes = pool.dtype.itemsize  # FP8 is converted before it is multiplied
        self.tiles = KeyTiles.choose(block_size(head_dim), item_bytes, _shared_bytes(pool.keys.device))
        self._num_cuts = _most_cuts(pool.keys.device, num_kv_heads)

    @staticmethod
    def runs(pool: KVPool) -> bool:
        """Whether this backend can serve the pool on this machine."""
        device = pool.keys.device
        if pool.is_fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
            return False
        return runs_on(device) and pool.keys.shape[3] % 2 == 0

    def plan(self, laid_out: Sequence[SpanRows], wanted: list[int]) -> PassPlan:
        """Build the plan of a pass; `wanted` are the rows whose logits are asked for."""
        check_window(self.shape, laid_out)
        starts, indices, slots = self.mirror.update([_table_of(rows) for rows in laid_out])
        prompts = [FlashSpan.of(rows) for rows in laid_out if self._takes_flash(rows)]
        own = [(rows, start) for rows, start in zip(laid_out, starts, strict=True) if not self._takes_flash(rows)]
        spans, words, depths = self._spans(own)
        num_rows = sum(rows.num_rows for rows in laid_out)
        most_rows = max((rows.num_rows for rows, _ in own), default=1)
        tile_rows, block_m = self._tile(most_rows)
        items, rows, num_partials = self._cut(spans, tile_rows, num_rows)
        positions = np.concatenate([np.asarray(rows.positions(), dtype=np.int64) for rows in laid_out])
        written = np.concatenate([rows.written_slots for rows in laid_out])
        bucketed = self._bucketed and all(span.num_rows <= _LONG_SPAN for span in laid_out)
        if bucketed:
            num_tiles = block_size(len(spans), 1) * -(-block_size(most_rows, 1) // tile_rows)
            padded, pending = rounded_rows(num_rows), block_size(_PENDING_PER_ROW * num_rows, 1)
            positions = _padded(positions, padded)
            written = _padded(written, padded, self.pool.scratch_slot)
            rows = _padded(rows, padded, _PADDING_ROW)
            if self.invariant:
                num_tiles = padded  # each row of a tree is one; and long texts have more items
            items = _padded(items, max(num_tiles + self._num_cuts, block_size(len(items), 1) * self.invariant))
            words, depths = (_padded(array, max(pending, block_size(len(array), 1))) for array in (words, depths))
            num_partials = len(items)
        arrays = [positions, written, items, rows, words, depths, indices, slots]
        if bucketed:
            arrays.append(rounded_logit_rows(wanted, block_size(len(laid_out), 1), len(positions)))
        elif len(wanted) < num_rows:
            arrays.append(np.array(wanted, dtype=np.int64))
        moved = self._send(arrays)
        self.mirror.tables.index_copy_(0, moved[6], moved[7])
        logit_rows = moved[8] if len(moved) > 8 else None
        attention = SplitKVPlan(
            self,
            self.pool,
            *moved[:6],
            block_m=block_m,
            num_partials=num_partials,
            bucketed=bucketed,
            prompts=prompts,
        )
        return PassPlan(num_rows, moved[0], logit_rows, attention, num_logits=len(wanted) if bucketed else None)

    def plan_chain(self, laid_out: Sequence[SpanRows], num_steps: int) -> list[PassPlan]:
        """Bucketed plans of passes that feed the rows of `laid_out`, `num_steps` of each sequence, one after the other,
        with the logits of all. Keys are cut as for the first step, and the last range of each sequence grows with its
        text: the host's work for all steps is little more than that for one."""
        assert self._bucketed
        assert not self.invariant
        assert all(rows.pending.is_chain and rows.num_rows == num_steps for rows in laid_out)
        check_window(self.shape, laid_out)
        starts, indices, slots = self.mirror.update([_table_of(rows) for rows in laid_out])
        num_rows, steps = len(laid_out), np.arange(num_steps)
        size = block_size(num_rows, 1)
        tile_rows, block_m = self._tile(1)
        pending = [rows.first_pending + 1 for rows in laid_out]
        spans = [
            (i, 1, rows.context, pending[i], start, -1, 0, -1)
            for i, (rows, start) in enumerate(zip(laid_out, starts, strict=True))
        ]
        first, rows, _ = _cut(np.array(spans), num_rows, tile_rows, self.tiles.block_n, self._num_cuts)
        growth = np.zeros_like(first)
        growth[:, _END] = first[:, _END] > first[:, _LIMIT]  # the ranges that end with the step's own key
        growth[:, [_WHOLE, _LIMIT]] = 1
        items = np.zeros((num_steps, size + self._num_cuts, first.shape[1]), dtype=np.int32)
        items[:, : len(first)] = first + steps[:, None, None] * growth
        positions = np.zeros((num_steps, size), dtype=np.int64)
        positions[:, :num_rows] = [own.context + own.skipped + own.first_pending for own in laid_out] + steps[:, None]
        written = np.full((num_steps, size), self.pool.scratch_slot, dtype=np.int64)
        written[:, :num_rows] = np.stack([own.written_slots for own in laid_out], 1)
        rows = _padded(rows, size, _PADDING_ROW)
        nothing = np.zeros(1, dtype=np.int32)
        wanted = rounded_logit_rows(range(num_rows), size, size)
        moved = self._send([positions, written, items, rows, nothing, wanted, indices, slots])
        self.mirror.tables.index_copy_(0, moved[6], moved[7])
        shape = {"block_m": block_m, "num_partials": items.shape[1], "bucketed": True}
        plans = []
        for step_positions, step_written, step_items in zip(*moved[:3], strict=True):
            tensors = step_positions, step_written, step_items, moved[3], moved[4], moved[4]
            attention = SplitKVPlan(self, self.pool, *tensors, **shape)
            plans.append(PassPlan(num_rows, step_positions, moved[5], attention, num_logits=num_rows))
        return plans

    def _send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        self.num_bytes_sent += sum(array.nbytes for array in arrays)
        return to_device(arrays, self.pool.keys.device)

    def plan_reads(self, reads: Sequence[TableRead]) -> SplitKVPlan:
        """Build the plan of queries over other tables, which write nothing: `SplitKVPlan.read` takes them."""
        starts, indices, slots = self.mirror.update([(read.seq_id, None) for read in reads])
        firsts = np.cumsum([0, *(read.num_rows for read in reads)])
        parts = zip(firsts, reads, starts, strict=False)
        # no chain: rows see the context alone, and there are no bits to be read
        spans = [(first, read.num_rows, len(read.slots), 0, start, 0, 0, 0) for first, read, start in parts]
        tile_rows, block_m = self._tile(max(read.num_rows for read in reads))
        items, rows, num_partials = self._cut(np.array(spans), tile_rows, int(firsts[-1]))
        nothing = np.zeros(1, dtype=np.int32)
        nowhere = np.zeros(len(rows), dtype=np.int64)
        moved = self._send([nowhere, items, rows, nothing, indices, slots])
        self.mirror.tables.index_copy_(0, moved[4], moved[5])
        tensors = moved[0], moved[0], moved[1], moved[2], moved[3], moved[3]
        plan = SplitKVPlan(self, self.pool, *tensors, block_m=block_m, num_partials=num_partials, bucketed=False)
        plan.prepare()
        return plan

    def _takes_flash(self, rows: SpanRows) -> bool:
        return self.flash and takes_flash(self.shape, rows)

    def _spans(self, laid_out: Sequence[tuple[SpanRows, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A record, as `_cut` takes it, for each span and the start of its table, and the bits and depths of the
        pending rows of those that are no chains."""
        spans, words, depths = list[tuple[int, ...]](), [_NOTHING], [_NOTHING]
        num_words = num_depths = 0
        for rows, start in laid_out:
            first_word = first_depth = -1
            words_per_row = 0
            if self.invariant and not rows.pending.is_chain:
                for i, seen in enumerate(rows.pending.visible(rows.first_pending)):
                    path = np.flatnonzero(seen).astype(np.int32)
                    spans.append((rows.first + i, 1, rows.context, len(path), start, -1, 0, num_depths))
                    depths.append(path)
                    num_depths += len(path)
                continue
            if not rows.pending.is_chain:
                bits = rows.pending.visible_words(rows.first_pending)
                first_word, first_depth, words_per_row = num_words, num_depths, bits.shape[1]
                words.append(bits.reshape(-1))
                depths.append(np.array(rows.pending.depths, dtype=np.int32))
                num_words += bits.size
                num_depths += rows.num_pending
            shape = rows.first, rows.num_rows, rows.context, rows.num_pending
            spans.append((*shape, start, first_word, words_per_row, first_depth))
        return np.array(spans, dtype=np.int64).reshape(-1, 8), np.concatenate(words), np.concatenate(depths)

    def _cut(self, spans: np.ndarray, tile_rows: int, num_rows: int) -> tuple[np.ndarray, np.ndarray, int]:
        fixed = FIXED_KEYS if self.invariant else None
        return _cut(spans, num_rows, tile_rows, self.tiles.block_n, self._num_cuts, fixed)

    def _tile(self, num_rows: int) -> tuple[int, int]:
        """Rows of a tile for spans of up to `num_rows`, and the rows of its matrices; the same up to a power of two."""
        group = self.shape.group
        num_rows = _LARGEST_TILE if self.invariant else num_rows
        block_m = block_size(group * min(block_size(num_rows, 1), max(1, _LARGEST_TILE // group)))
        return block_m // group, block_m


def most_partial_bytes(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_rows: int,
    num_seqs: int,
    device: torch.device,
    *,
    longest: int = 0,
    tree_rows: int = 0,
) -> int:
    """An upper bound of what a pass takes for results that are still to be merged: every item one, of a whole tile. Of
    invariant passes `longest` is the longest text, and `tree_rows` those of a pass that is rounded up, each of which
    may be a tile of its own."""
    if not num_rows:
        return 0
    group = num_heads // num_kv_heads
    tile, num_cuts = max(_LARGEST_TILE, block_size(group)), _most_cuts(device, num_kv_heads)
    num_items = -(-num_rows * group // _LARGEST_TILE) + num_seqs + num_cuts
    if longest:
        num_ranges = -(-longest // FIXED_KEYS)
        num_items = max(num_items * num_ranges, tree_rows + num_cuts, block_size(tree_rows * num_ranges, 1))
    return num_items * num_kv_heads * tile * (head_dim + 1) * torch.float32.itemsize


def _most_cuts(device: torch.device, num_kv_heads: int) -> int:
    """Items of a pass beyond one for each tile."""
    num_processors = _FEW_PROCESSORS
    if device.type == "cuda" and torch.cuda.is_available():
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return 1 << max(1, _PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads).bit_length() - 1


def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; as on an H100 where there is no GPU."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return 227 << 10


_NOTHING = np.empty(0, dtype=np.int32)
_PADDING_ROW = np.array([[-1, -1, 0]], dtype=np.int32)


def _padded(array: np.ndarray, size: int, value: int | np.ndarray = 0) -> np.ndarray:
    """The array with more rows of `value`, `size` in all."""
    padded = np.empty((size, *array.shape[1:]), dtype=array.dtype)
    padded[: len(array)] = array
    padded[len(array) :] = value
    return padded


def _cut(
    spans: np.ndarray, pass_rows: int, tile_rows: int, block_n: int, num_cuts: int, fixed: int | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Items [n, FIELDS] of spans (first, num_rows, context, num_pending, table, words, words_per_row, depths), tiles of
    `tile_rows` rows in ranges of keys of equal length, `fixed` or `num_cuts` more of them than tiles at most; the parts
    of the result of each of `pass_rows` rows [T, 3] (the first, their number, 0 also for rows of no span, the row
    within its tile); and the number of parts."""
    tiles_of_span = -(-spans[:, 1] // tile_rows)
    tile_span = np.repeat(np.arange(len(spans)), tiles_of_span)
    offset = _places(tiles_of_span) * tile_rows
    first, num_rows, context, num_pending, table, words, words_per_row, depths = spans[tile_span].T
    tile_len = np.minimum(num_rows - offset, tile_rows)
    is_chain = words < 0
    limit = np.where(is_chain, context + num_pending - num_rows + offset, context - 1)
    stop = np.where(is_chain, limit + tile_len, context + num_pending)  # after the last key that a row sees
    length = block_n * max(1, -(-int(stop.sum()) // (num_cuts * block_n)))
    length = length if fixed is None else fixed
    parts = np.maximum(1, -(-stop // length))  # a row that sees no key is 0
    is_cut = parts > 1
    partial = np.where(is_cut, np.cumsum(parts * is_cut) - parts * is_cut, -1)
    tile = np.repeat(np.arange(len(tile_span)), parts)
    part = _places(parts)
    of_tile = np.empty((len(tile_span), _NUM_FIELDS), dtype=np.int32)
    shared = first + offset, tile_len, 0, 0, limit + 1, limit, context, table
    bits = np.where(is_chain, -1, words + offset * words_per_row), words_per_row, depths, partial
    for field, values in enumerate((*shared, *bits)):
        of_tile[:, field] = values
    items = of_tile[tile]
    items[:, _BEGIN] = part * length
    items[:, _END] = np.minimum((part + 1) * length, stop[tile])
    items[:, _PARTIAL] += np.where(is_cut[tile], part, 0)
    row_tile = np.repeat(np.arange(len(tile_span)), tile_len)
    place = _places(tile_len)
    rows = np.zeros((pass_rows, 3), dtype=np.int32)
    rows[(first + offset)[row_tile] + place] = np.stack((partial[row_tile], (parts * is_cut)[row_tile], place), axis=1)
    return items, rows, int((parts * is_cut).sum())


def _table_of(rows: SpanRows) -> TableOrPart:
    return rows.seq_id, rows.slots if rows.is_part else None


def _places(counts: np.ndarray) -> np.ndarray:
    """0 to count - 1 for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
