"""The pool of KV rows of a rank, and the table of slots of each sequence.

A slot is the place of one token's key and value in every layer. A sequence's table lists the slots of its committed
rows, then of its pending ones (reserved, not yet kept). Committing a path of pending rows edits that table on the
host; no row moves. Knows no token trees and no attention.

    table of a sequence   [ committed rows ........ | pending rows .... ]
                            0           cached_len ^     num_rows ^

A sequence may have dropped rows of the middle of its text (`drop`): then a row's index in the table is not its position
in the text (`text_len`), and the rows behind the gap either keep the positions that they were computed with, or were
moved to those of their indices (`skipped`).

A sequence may borrow committed rows: they are rows of another, which owns their slots; rows that it adds are its own.
One that is opened with its text borrows the rows of the longest beginning of it that the prefix tree has
(`prefix_tree.py`), and its own committed rows go over to the tree: when it is closed, and when a sequence is opened
whose text may begin with them. Rows that no open sequence has are free for `reserve`, which takes them from the tree.

Slots are allocated so that a sequence stays one contiguous run as long as possible: it continues after its last row;
otherwise a run starts in the middle of the largest gap, which leaves room for the sequence before the gap. Gaps are
looked for among all slots only when many were freed since, so that a run costs what is asked for, not what there is.
"""

from __future__ import annotations

import heapq
import math
import mmap
from array import array
from collections.abc import Hashable, Sequence

import numpy as np
import torch

from parallel.kv.prefix_tree import PrefixTree, RowRun, Text

SeqId = Hashable
FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = torch.finfo(FP8).max
_ROOM = np.zeros(64, dtype=np.int64)
_SLOTS_PER_FREED = 64
"""Slots that may be searched for gaps for each one that was freed."""
_MOST_GAPS = 256
"""Gaps that a search finds; once they are used up, the next one follows."""


class SlotTable:
    """Slots of one sequence; `run_len` leading rows are known to lie in one contiguous run, which begins at the slot
    `start`, `num_borrowed` are of another sequence or of the tree, and `first_changed` are as they were when it was
    last taken. `node` is where the rows of `text` that are of the tree end; if there are fewer of them by now, rows
    were dropped since. `source` is the sequence whose rows its own read too."""

    __slots__ = (
        "_num_written",
        "_slots",
        "_words",
        "cached_len",
        "first_changed",
        "gap",
        "moved",
        "node",
        "num_borrowed",
        "num_dropped",
        "num_rows",
        "run_len",
        "source",
        "start",
        "text",
    )

    def __init__(self, borrowed: np.ndarray | None = None, run_len: int = 0) -> None:
        self.text: Text | None = None
        self.source: SeqId | None = None
        self.node: RowRun | None = None
        self._keep_in(np.empty(64, dtype=np.int64) if borrowed is None else np.append(borrowed, _ROOM))
        self.cached_len = self.num_rows = self.num_borrowed = 0 if borrowed is None else len(borrowed)
        self._num_written = self.num_rows
        self.run_len = run_len
        self.start = self._words[0] if run_len else 0
        self.first_changed = 0
        self.num_dropped = self.gap = self.moved = 0
        """Positions of the text without rows, from `gap` on, and by how many the rows behind were moved back."""

    @property
    def slots(self) -> np.ndarray:
        """Slots of all rows, and room behind them. The last rows of a run are written when they are asked for: most
        passes need no more than where the run begins."""
        if self._num_written < self.num_rows:
            self._write(self._num_written, self.start + self._num_written)
        return self._slots

    def _keep_in(self, slots: np.ndarray) -> None:
        """Slots stand in this memory from now on."""
        self._slots = slots
        self._words = slots.data.cast("B").cast("q")  # to write and read a few, in less time than NumPy takes

    def _write(self, first: int, start: int) -> None:
        """Put slots from `start` on behind the `first` rows."""
        end = self.num_rows
        if end > len(self._words):
            grown = np.empty(max(end, 2 * len(self._slots)), dtype=np.int64)
            grown[:first] = self._slots[:first]
            self._keep_in(grown)
        self._words[first:end] = array("q", range(start, start + end - first))
        self._num_written = end

    @property
    def run(self) -> range | None:
        """The slots as a range if all rows are one contiguous run, else None."""
        return range(self.start, self.start + self.num_rows) if self.run_len == self.num_rows else None

    @property
    def skipped(self) -> int:
        """How much the position that a next row is computed with exceeds its index."""
        return self.num_dropped - self.moved

    @property
    def next_slot(self) -> int:
        """The one behind the last row's."""
        return self.start + self.num_rows if self.run_len == self.num_rows else self._words[self.num_rows - 1] + 1

    def append(self, start: int, num_rows: int) -> None:
        """Rows in a run of slots."""
        first = self.num_rows
        if not first:
            self.start = start
        if self.run_len == first and start == self.start + first:
            self.num_rows = self.run_len = first + num_rows
            return
        if self._num_written < first:
            self._write(self._num_written, self.start + self._num_written)
        self.num_rows = first + num_rows
        self._write(first, start)

    def shorten(self, num_rows: int) -> np.ndarray | range:
        """Drop the rows after the first `num_rows`; returns the slots of its own among them."""
        first, run = max(num_rows, self.num_borrowed), self.run
        dropped = self._slots[first : self.num_rows].copy() if run is None else run[first:]
        self.num_rows = num_rows
        self._num_written = min(self._num_written, num_rows)
        self.num_borrowed = min(self.num_borrowed, num_rows)
        self.run_len = min(self.run_len, num_rows)
        self.first_changed = min(self.first_changed, num_rows)
        return dropped

    def cut(self, first: int, stop: int) -> np.ndarray:
        """Drop the rows from `first` to `stop`, which are committed; returns their slots."""
        slots, end = self.slots, self.num_rows - (stop - first)
        dropped = slots[first:stop].copy()
        slots[first:end] = slots[stop : self.num_rows].copy()
        self.num_rows = self._num_written = end
        self.cached_len -= stop - first
        self.run_len = min(self.run_len, end)
        self.note_rewritten(first)
        return dropped

    def rows_before(self, length: int) -> int:
        """Number of leading rows that are those of the first `length` positions; where some of these were dropped, of
        the positions before them."""
        behind = length - self.num_dropped
        return behind if behind >= self.gap else min(length, self.gap)

    def may_begin(self, text: Text) -> bool:
        """Whether rows that the tree has not may be of a beginning of this text: it goes on with the same token."""
        own, end = self.text, self.num_borrowed
        if own is None or own.scope != text.scope or not end < min(self.cached_len, len(text.token_ids)):
            return False
        return text.token_ids[end : end + 1] == own.token_ids[end : end + 1]

    def note_rewritten(self, start: int) -> None:
        """The rows from `start` on were rewritten: recompute the length of the leading run."""
        self.first_changed = min(self.first_changed, start)
        if self.run_len < start:
            return
        slots, end = self.slots, max(start, min(1, self.num_rows))
        while end < self.num_rows and slots[end] == slots[end - 1] + 1:
            end += 1
        self.run_len = end
        self.start = int(slots[0]) if end else 0


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not empty: a masked row is multiplied by a weight of zero, and zero times NaN is NaN.

    On a CPU the system gives zeroed pages as rows are first written: writing a whole pool took half of the start.
    """
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a first write to a shared page takes half as long again
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=private)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class KVPool:
    """Keys and values [num_layers, num_slots, num_kv_heads, head_dim] and the sequences' tables of slots.

    Rows are computed with in `dtype`. As `stored` they may be FP8: each number divided by its layer's scale (of keys,
    of values) and rounded to e4m3, at most 448. Whatever reads a row reads it rounded, in the pass that wrote it too,
    so that a row says the same in a verification as in plain decoding.

    Call `can_reserve` before `reserve`. One more row, the scratch slot, belongs to no sequence: padding reads and
    writes it.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        stored: torch.dtype | None = None,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        assert stored in (None, dtype, FP8), f"rows of {dtype} are not stored as {stored}"
        shape = num_layers, num_slots + 1, num_kv_heads, head_dim
        self.dtype = dtype
        self.keys, self.values = (_zeros(shape, stored or dtype, torch.device(device)) for _ in range(2))
        self.is_fp8 = self.keys.dtype == FP8
        self.scales = list(scales or [(1.0, 1.0)] * num_layers)
        # index operations have no FP8 on every device; they move bytes as well
        self._moved = [rows.view(torch.uint8) if self.is_fp8 else rows for rows in (self.keys, self.values)]
        self.num_slots = num_slots
        self.scratch_slot = num_slots
        self.num_free = num_slots
        self._free = bytearray(b"\x01" * num_slots)
        self._gaps = [(-num_slots, 0)]  # a heap: length, negative, and start; their first slots may be taken by now
        self._num_freed = 0  # slots, since gaps were looked for
        self._tables: dict[SeqId, SlotTable] = {}
        self._tree = PrefixTree()

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:
        """A sequence whose committed rows are those of the longest known beginning of `text`, short of its last
        token; without a text, or if nothing is known, it has none."""
        assert seq_id not in self._tables, f"sequence {seq_id!r} is open already"
        self._tables[seq_id] = SlotTable() if text is None else self._table_of(text)

    def borrow(self, seq_id: SeqId, owner: SeqId) -> None:
        """Open a sequence whose committed rows are those that `owner` has now; close it before `owner` frees any."""
        assert seq_id not in self._tables, f"sequence {seq_id!r} is open already"
        table = self._tables[owner]
        rows = table.cached_len
        assert not table.num_dropped, "rows of a whole text are lent"
        self._tables[seq_id] = borrowing = SlotTable(table.slots[:rows], min(rows, table.run_len))
        borrowing.source = table.source

    def close(self, seq_id: SeqId) -> None:
        """Its pending rows are dropped, and the committed ones of a text are known from now on."""
        table = self._tables.pop(seq_id)
        if table.text is not None:
            self._publish(table, table.text)
            assert table.node is not None
            self._tree.leave(table.node)
        self._release(table.shorten(0))

    def forget_texts(self) -> None:
        """No beginning of a text is known any more. Close all sequences before."""
        assert not self._tables, "sequences are open"
        self._release(self._tree.evict(self._tree.num_idle))

    def set_source(self, seq_id: SeqId, source: SeqId) -> None:
        """Rows of the sequence, and of those that borrow from it, also read the rows of another one, which stays open
        as long."""
        self._tables[seq_id].source = source

    def source_of(self, seq_id: SeqId) -> SeqId | None:
        return self._tables[seq_id].source

    def cached_len(self, seq_id: SeqId) -> int:
        return self._tables[seq_id].cached_len

    def text_len(self, seq_id: SeqId) -> int:
        """Positions of the text up to the last committed row, those of dropped rows included."""
        table = self._tables[seq_id]
        return table.cached_len + table.num_dropped

    def skipped(self, seq_id: SeqId) -> int:
        """How much the position that a next row is computed with exceeds its index."""
        return self._tables[seq_id].skipped

    def pending_len(self, seq_id: SeqId) -> int:
        table = self._tables[seq_id]
        return table.num_rows - table.cached_len

    def can_reserve(self, num_rows: int) -> bool:
        return num_rows <= self.num_free + self._tree.num_idle

    def slots(self, seq_id: SeqId) -> np.ndarray:
        """Slots of all rows in order, int64 [num_rows]; a view, valid until the table changes."""
        table = self._tables[seq_id]
        return table.slots[: table.num_rows]

    def take_first_changed(self, seq_id: SeqId) -> int:
        """Number of leading rows whose slots are those of the last call; 0 at the first."""
        table = self._tables[seq_id]
        first, table.first_changed = table.first_changed, table.num_rows
        return first

    def run(self, seq_id: SeqId) -> range | None:
        """The slots as a range if all rows are one contiguous run, else None."""
        return self._tables[seq_id].run

    def leading_run(self, seq_id: SeqId, num_rows: int) -> range | None:
        """The slots of the first rows as a range if they are one contiguous run, else None."""
        table = self._tables[seq_id]
        return None if table.run_len < num_rows else range(table.start, table.start + num_rows)

    def extend(self, seq_id: SeqId, num_rows: int) -> SlotTable:
        """Append `num_rows` pending rows; returns the table, to be read alone."""
        if num_rows > self.num_free:
            assert self.can_reserve(num_rows), f"{num_rows} rows requested, {self.num_free} slots free"
            self._release(self._tree.evict(num_rows - self.num_free))
        self.num_free -= num_rows
        table, free = self._tables[seq_id], self._free
        if table.num_rows:
            start = table.next_slot
            stop = start + num_rows
            if stop <= self.num_slots and free.find(0, start, stop) < 0:
                free[start:stop] = bytes(num_rows)
                table.append(start, num_rows)
                return table
        for run in self._take(num_rows):
            table.append(run.start, len(run))
        return table

    def reserve(self, seq_id: SeqId, num_rows: int) -> np.ndarray:
        """The same; returns the slots of these rows, int64 [num_rows]."""
        table = self.extend(seq_id, num_rows)
        return table.slots[table.num_rows - num_rows : table.num_rows]

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        """Pending rows `keep`, in that order, become committed; rows `retain` stay pending; the others are freed."""
        table = self._tables[seq_id]
        start, num_kept = table.cached_len, len(keep) + len(retain)
        chosen = [*keep, *retain]
        if num_kept == 1 and not retain and table.num_rows == start + 1:  # plain decoding
            assert chosen == [0], f"row {chosen[0]} is not pending"
            table.cached_len += 1
            return
        if chosen != list(range(num_kept)):
            pending = table.slots[start : table.num_rows].copy()
            rest = np.ones(len(pending), dtype=bool)
            rest[chosen] = False
            assert len(pending) - rest.sum() == num_kept, "a pending row was named twice"
            table.slots[start : start + num_kept] = pending[chosen]
            table.slots[start + num_kept : table.num_rows] = pending[rest]
            table.note_rewritten(start)
        self._release(table.shorten(start + num_kept))
        table.cached_len = start + len(keep)

    def truncate(self, seq_id: SeqId, length: int) -> None:
        """Keep the committed rows of the first `length` positions; pending rows go too. Where rows of these were
        dropped and none behind them stays, only those of the positions in front."""
        table = self._tables[seq_id]
        text_len = table.cached_len + table.num_dropped
        assert 0 <= length <= text_len, f"cannot truncate {text_len} positions to {length}"
        rows = table.rows_before(length)
        self._release(table.shorten(rows))
        table.cached_len = rows
        if rows + table.num_dropped > length:
            table.num_dropped = table.gap = table.moved = 0

    def drop(self, seq_id: SeqId, first: int, num_rows: int, *, moved: bool) -> None:
        """Free committed rows of the sequence's own from index `first` on, which is the same in all calls. `moved`: the
        caller gives the rows behind them the positions of their new indices."""
        table = self._tables[seq_id]
        stop = first + num_rows
        assert table.text is None, "known rows of a text are not dropped"
        assert table.num_borrowed <= first < stop <= table.cached_len, "rows that are dropped are committed and own"
        assert table.gap == first or not table.num_dropped, "rows are dropped in one place"
        self._release(table.cut(first, stop))
        table.gap = first
        table.num_dropped += num_rows
        table.moved += num_rows * moved

    # --- rows --------------------------------------------------------------------------------------------------------

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values [n, kv_heads, head_dim] of a layer into these slots."""
        self.write_keys(layer, slots, keys)
        self._moved[1][layer].index_copy_(0, slots, self._as_stored(values, self.scales[layer][1]))

    def write_keys(self, layer: int, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Put keys alone; the values in these slots stay."""
        self._moved[0][layer].index_copy_(0, slots, self._as_stored(keys, self.scales[layer][0]))

    def _as_stored(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        if not self.is_fp8:
            return rows
        rows = (rows if scale == 1 else rows.float() / scale).clamp(-_LARGEST_FP8, _LARGEST_FP8)
        return rows.to(FP8).view(torch.uint8)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, kv_heads, head_dim] of a layer in these slots."""
        keys, values = (stored[layer].index_select(0, slots) for stored in self._moved)
        return self.widened(layer, keys.view(FP8), values.view(FP8)) if self.is_fp8 else (keys, values)

    def read_keys(self, layer: int, slots: torch.Tensor | range) -> torch.Tensor:
        """Keys alone [n, kv_heads, head_dim]; those of a run of slots are not copied."""
        stored = self._moved[0][layer]
        keys = stored[slots.start : slots.stop] if isinstance(slots, range) else stored.index_select(0, slots)
        return self._widened_by(keys.view(FP8), self.scales[layer][0]) if self.is_fp8 else keys

    def widened(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a layer as they stand in the pool -> the numbers that they stand for, in `dtype`."""
        if not self.is_fp8:
            return keys, values
        key_scale, value_scale = self.scales[layer]
        return self._widened_by(keys, key_scale), self._widened_by(values, value_scale)

    def _widened_by(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        rows = rows.to(self.dtype)
        return rows if scale == 1 else rows * scale

    def copy(self, layers: range, source: torch.Tensor, into: torch.Tensor) -> None:
        """Copy the rows of these layers from slots to others."""
        for stored in self._moved:
            part = stored[layers.start : layers.stop]
            part.index_copy_(1, into, part.index_select(1, source))

    def check(self) -> None:
        """Assert that every slot is free or owned exactly once, no borrowed one is free, and the runs are right."""
        owners = np.frombuffer(self._free, dtype=np.uint8).astype(np.int64)
        assert owners.sum() == self.num_free, "the count of free slots is off"
        nodes = [*self._tree.nodes()]
        for node in nodes:
            np.add.at(owners, node.slots, 1)
        idle = sum([len(node.slots) for node in nodes if not node.num_owners])
        assert idle == self._tree.num_idle, f"{idle} rows of the tree have no owner, {self._tree.num_idle} counted"
        for seq_id, table in self._tables.items():
            rows = table.slots[: table.num_rows]
            np.add.at(owners, rows[table.num_borrowed :], 1)
            lent = np.frombuffer(self._free, dtype=np.uint8)[rows[: table.num_borrowed]]
            assert not lent.any(), f"{seq_id!r}: borrows rows that nothing owns"
            assert 0 <= table.cached_len <= table.num_rows, f"{seq_id!r}: more rows committed than owned"
            breaks = np.flatnonzero(np.diff(rows) != 1)
            run_len = int(breaks[0]) + 1 if len(breaks) else len(rows)
            assert table.run_len == run_len, f"{seq_id!r}: run of {run_len} rows recorded as {table.run_len}"
            assert not run_len or table.start == rows[0], (
                f"{seq_id!r}: a run from {rows[0]} recorded from {table.start}"
            )
        assert (owners == 1).all(), f"slots {np.flatnonzero(owners != 1)[:8].tolist()} are not owned exactly once"

    def _table_of(self, text: Text) -> SlotTable:
        """A table that begins with known rows of the text, which it owns from now on beside others. All tables together
        have at most twice as many rows as there are slots: a mirror of them is of a fixed size."""
        for table in self._tables.values():
            if table.text is not None and table.may_begin(text):
                self._publish(table, table.text)
        num_owned = self._tree.num_rows - self._tree.num_idle
        num_shared = sum([table.num_borrowed for table in self._tables.values()]) - num_owned
        room = max(0, self.num_slots - num_shared)
        token_ids = np.array(text.token_ids[: min(len(text.token_ids) - 1, room)], dtype=np.int64)
        node = self._tree.find(self._tree.root, text.scope, token_ids)
        self._tree.own(node)
        table = SlotTable(node.path_slots())
        table.text, table.node = text, node
        table.note_rewritten(0)
        return table

    def _publish(self, table: SlotTable, text: Text) -> None:
        """Let the tree have the committed rows of a text; those that it has already replace the sequence's own."""
        assert table.node is not None
        tree, last = self._tree, table.node
        start = last if table.num_borrowed == last.end else tree.root
        length = min(table.cached_len, len(text.token_ids))
        if length <= table.num_borrowed:
            return
        token_ids = np.array(text.token_ids[start.end : length], dtype=np.int64)
        node = tree.find(start, text.scope, token_ids)
        self._replace(table, node)
        if node.end < length:
            own = table.slots[node.end : length].copy()
            node = tree.add(node, text.scope, token_ids[node.end - start.end :], own)
        tree.own(node)
        tree.leave(last)
        table.node, table.num_borrowed = node, node.end

    def _replace(self, table: SlotTable, node: RowRun) -> None:
        """The rows up to `node` are those of the tree; the table's own among them are free."""
        first = table.num_borrowed
        assert first <= node.end, "rows that are borrowed are in the tree"
        if first < node.end:
            own = table.slots[first : node.end].copy()
            table.slots[first : node.end] = node.path_slots()[first:]
            table.note_rewritten(first)
            self._release(own)

    def _release(self, slots: np.ndarray | range) -> None:
        count = len(slots)
        if not count:
            return
        if isinstance(slots, range):
            self._free[slots.start : slots.stop] = b"\x01" * count
        else:
            np.frombuffer(self._free, dtype=np.uint8)[slots] = 1
        self.num_free += count
        self._num_freed += count

    def _take(self, num_rows: int) -> list[range]:
        """Runs of free slots, `num_rows` in all, which are free no longer."""
        if self._num_freed * _SLOTS_PER_FREED >= self.num_slots:
            self._find_gaps()
        runs = []
        while num_rows:
            gap = self._take_largest_gap()
            # start in the middle of a gap that follows another sequence, so that both can grow
            before = max(0, len(gap) - num_rows) // 2 if gap.start else 0
            run = gap[before : before + num_rows]
            self._free[run.start : run.stop] = bytes(len(run))
            for rest in (range(gap.start, run.start), range(run.stop, gap.stop)):
                if rest:
                    heapq.heappush(self._gaps, (-len(rest), rest.start))
            runs.append(run)
            num_rows -= len(run)
        return runs

    def _take_largest_gap(self) -> range:
        """The largest of the gaps that are known, which is known no longer."""
        while True:
            if not self._gaps:
                self._find_gaps()
            length, start = heapq.heappop(self._gaps)
            gap = range(self._free.rfind(0, start, start - length) + 1 or start, start - length)
            if len(gap) == -length:
                return gap
            if gap:
                heapq.heappush(self._gaps, (-len(gap), gap.start))

    def _find_gaps(self) -> None:
        """Look at all slots, and know the largest gaps."""
        edges = np.flatnonzero(np.diff(np.frombuffer(b"\x00" + self._free + b"\x00", dtype=np.int8)))
        starts, lengths = edges[::2], edges[::2] - edges[1::2]
        if len(starts) > _MOST_GAPS:
            largest = np.argpartition(lengths, _MOST_GAPS)[:_MOST_GAPS]
            starts, lengths = starts[largest], lengths[largest]
        self._gaps = [*zip(lengths.tolist(), starts.tolist(), strict=True)]
        heapq.heapify(self._gaps)
        self._num_freed = 0
