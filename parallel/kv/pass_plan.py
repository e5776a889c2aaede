"""Lays out the rows that sequences feed in a pass: positions, slots and visible rows, computed on the host.

A row's parent is another pending row or the last committed one; its position is its depth, and it sees its ancestors.
A plan holds no token values, so plans can be built ahead of the passes that run them. Knows no weights and no
attention backend.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from parallel.kv.pool import KVPool, SeqId

_WORD = 32


@dataclass(frozen=True, slots=True)
class Span:
    """Rows that a sequence feeds in a pass; they are appended to its pending rows.

    `parents[i]` is the index of row i's parent among the sequence's pending rows since its last commit, -1 for the
    last committed row; None is a chain after the last pending row. The pass returns logits of the last `num_logits`, or
    of those in `wanted`, ascending indices.
    `has_streams`: streams begin at these, where the runner has streams (`StreamingRunner`).
    """

    seq_id: SeqId
    num_tokens: int
    parents: Sequence[int] | None = None
    num_logits: int = 1
    has_streams: bool = True
    wanted: Sequence[int] | None = None

    @property
    def num_text(self) -> int:
        """Rows of text in a draft's exact pass, up to the root, the first row with logits; draft tokens follow."""
        return self.num_tokens - max(0, self.num_logits - 1)


class PendingRows:
    """A sequence's pending rows: a forest whose roots follow its committed rows. Of a chain only the length is kept.

    `_ancestors[i]` has bit j set where row i sees row j, itself included; computed only if the rows are not a chain.
    """

    __slots__ = ("_ancestors", "_depths", "_parents", "is_chain", "num_rows")

    def __init__(self) -> None:
        self.num_rows = 0
        self.is_chain = True
        self._depths: list[int] = []  # these three of what is no chain
        self._parents: list[int] = []
        self._ancestors: list[int] = []

    @property
    def depths(self) -> Sequence[int]:
        return range(self.num_rows) if self.is_chain else self._depths

    @property
    def parents(self) -> Sequence[int]:
        return range(-1, self.num_rows - 1) if self.is_chain else self._parents

    def append(self, num_rows: int, parents: Sequence[int] | None) -> None:
        first = self.num_rows
        self.num_rows = first + num_rows
        if self.is_chain:
            if parents is None:
                return
            self._depths, self._parents, self.is_chain = [*range(first)], [*range(-1, first - 1)], False
        depths = self._depths
        if parents is None:
            depth = depths[-1] + 1 if first else 0
            depths.extend(range(depth, depth + num_rows))
            self._parents.extend(range(first - 1, first + num_rows - 1))
            return
        assert len(parents) == num_rows, f"{num_rows} rows, {len(parents)} parents"
        self._parents.extend(parents)
        for i, parent in enumerate(parents, first):
            assert -1 <= parent < i, f"pending row {i} names parent {parent}"
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.is_chain = not depths or depths[-1] == len(depths) - 1  # each a level below the one before

    def visible(self, first: int) -> np.ndarray:
        """Which pending rows the rows from `first` on see: bool [rows from `first` on, all rows]."""
        num_rows = self.num_rows
        if self.is_chain:
            return np.tri(num_rows - first, num_rows, first, dtype=bool)
        packed = self.visible_words(first).view(np.uint8)
        return np.unpackbits(packed, axis=1, count=num_rows, bitorder="little").view(bool)

    def visible_words(self, first: int) -> np.ndarray:
        """`visible` as bits, int32 [rows from `first` on, words]: row j is bit j % 32 of word j // 32."""
        num_rows, parents = self.num_rows, self.parents
        for i in range(len(self._ancestors), num_rows):
            parent = parents[i]
            self._ancestors.append((self._ancestors[parent] if parent >= 0 else 0) | 1 << i)
        num_words = -(-num_rows // _WORD)
        bits = b"".join([mask.to_bytes(num_words * _WORD // 8, "little") for mask in self._ancestors[first:]])
        return np.frombuffer(bits, dtype="<i4").reshape(num_rows - first, num_words)

    def after_commit(self, keep: Sequence[int], retain: Sequence[int]) -> PendingRows:
        """The forest of the rows `retain` after the path `keep` is committed."""
        rest = PendingRows()
        if not retain:
            return rest
        renumbered = {keep[-1] if keep else -1: -1} | {row: i for i, row in enumerate(retain)}
        rest.append(len(retain), [renumbered[self.parents[row]] for row in retain])
        return rest


class RangedRows(PendingRows):
    """Pending rows that see ranges of them: rows that see later ones, and copies of a block.

    `ranges()` has (shared, first, last) of every row: it sees rows 0 to shared - 1, each of which stands at the
    position of its index, and first to last - 1 right behind these. Where the second range is not empty, shared is
    `num_common`. Nothing stays pending after a commit.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.is_chain = False

    @abstractmethod
    def ranges(self) -> Sequence[tuple[int, int, int]]: ...

    @property
    def num_common(self) -> int:
        """Leading rows at the position of their index."""
        return self.num_rows

    def append(self, num_rows: int, parents: Sequence[int] | None) -> None:
        super().append(num_rows, parents)
        self.is_chain = False

    def visible(self, first: int) -> np.ndarray:
        seen = np.array(self.ranges()[first:]).reshape(-1, 3, 1)
        columns = np.arange(self.num_rows)
        return (columns < seen[:, 0]) | ((columns >= seen[:, 1]) & (columns < seen[:, 2]))

    def visible_words(self, first: int) -> np.ndarray:
        num_rows, num_words = self.num_rows, -(-self.num_rows // _WORD)
        padded = np.zeros((num_rows - first, num_words * _WORD), dtype=bool)
        padded[:, :num_rows] = self.visible(first)
        return np.packbits(padded, axis=1, bitorder="little").view("<i4")


class MutualRows(RangedRows):
    """Consecutive rows after the committed ones that see each other, whatever their order: a block drafter's."""

    __slots__ = ()

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.append(num_rows, None)

    def ranges(self) -> Sequence[tuple[int, int, int]]:
        return [(self.num_rows, 0, 0)] * self.num_rows


class TextThenBlock(RangedRows):
    """A chain of `num_text` rows after the committed ones, then a block of rows that see the chain and each other."""

    __slots__ = ("_num_text",)

    def __init__(self, num_text: int) -> None:
        super().__init__()
        self._num_text = num_text

    def ranges(self) -> Sequence[tuple[int, int, int]]:
        num_rows = self.num_rows
        num_text = min(self._num_text, num_rows)
        return [(row + 1, 0, 0) for row in range(num_text)] + [(num_rows, 0, 0)] * (num_rows - num_text)


class BlockCopies(RangedRows):
    """Whole blocks of text after the committed rows, then copies of what follows them, so many rows each, at the same
    positions. A row sees the text and, of its own copy, what is up to the end of its block. `before`: the copies stand
    before so many of the committed rows, whose positions are behind them."""

    __slots__ = ("_block", "_copies", "_num_text")

    def __init__(self, num_text: int, copies: Sequence[int], block: int, before: int = 0) -> None:
        super().__init__()
        assert not any(size % block for size in (num_text, *copies)), f"{num_text}, {copies}: no blocks of {block}"
        self._num_text, self._copies, self._block = num_text, copies, block
        self.append(num_text + sum(copies), None)
        self._depths[num_text:] = [num_text - before + row for size in copies for row in range(size)]

    @property
    def num_common(self) -> int:
        return self._num_text

    def append(self, num_rows: int, parents: Sequence[int] | None) -> None:
        """Once, before the rows are laid out."""
        if not self.num_rows:
            super().append(num_rows, parents)

    def ranges(self) -> Sequence[tuple[int, int, int]]:
        num_text, block = self._num_text, self._block
        seen, first = [(row // block * block + block, 0, 0) for row in range(num_text)], num_text
        for size in self._copies:
            seen += [(num_text, first, first + row // block * block + block) for row in range(size)]
            first += size
        return seen


@dataclass(slots=True)
class SpanRows:
    """A span in its pass: rows `first` to `first + num_rows`, of a sequence with `context` committed rows."""

    seq_id: SeqId
    first: int
    num_rows: int
    context: int
    num_pending: int  # including the rows of this pass
    table: np.ndarray | None  # the slots of all rows, those of this pass the last; may be None where they are a run
    run: range | None  # the slots, if they are one contiguous run
    pending: PendingRows
    room: int = 0  # rows that later steps of a chain append: sizes that are rounded up are those of the last step
    skipped: int = 0  # by how much the position of a pending row exceeds its index among `slots`
    is_part: bool = False  # the slots are not those of the sequence's table

    @property
    def slots(self) -> np.ndarray:
        """Slots of all rows; those of this pass are the last."""
        if self.table is None:
            assert self.run is not None
            return np.arange(self.run.start, self.run.stop)
        return self.table

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.num_rows)

    @property
    def first_pending(self) -> int:
        """Index of the pass's first row among the pending ones."""
        return self.num_pending - self.num_rows

    @property
    def written_slots(self) -> np.ndarray:
        return self.slots[-self.num_rows :]

    def positions(self) -> Sequence[int]:
        """Positions that the pass's rows are computed with."""
        return self._places(self.context + self.skipped)

    def depth_indices(self) -> Sequence[int]:
        """Positions of the pass's rows as those of keys are counted: by their indices."""
        return self._places(self.context)

    def seeing(self, chosen: np.ndarray) -> SpanRows:
        """The same rows, which of the committed ones see those of the indices `chosen`, int64 in ascending order."""
        slots = np.concatenate((self.slots[chosen], self.slots[self.context :]))
        skipped = self.skipped + self.context - len(chosen)
        return replace(self, context=len(chosen), table=slots, run=None, skipped=skipped, is_part=True)

    def _places(self, context: int) -> Sequence[int]:
        end, pending = self.num_pending, self.pending
        if pending.is_chain:
            return range(context + end - self.num_rows, context + end)
        return [context + depth for depth in pending.depths[end - self.num_rows :]]


@dataclass(frozen=True, slots=True)
class TableRead:
    """`num_rows` queries that see the rows in `slots`, the leading ones of a sequence's table, and add none. Views of
    the table: use them before its next change."""

    seq_id: SeqId
    num_rows: int
    slots: np.ndarray
    run: range | None  # the slots, if they are one contiguous run


def table_read(pool: KVPool, seq_id: SeqId, num_rows: int, num_keys: int | None = None) -> TableRead:
    """So many queries over the first `num_keys` rows of a sequence, by default over those that are committed."""
    slots, length = pool.slots(seq_id), pool.cached_len(seq_id) if num_keys is None else num_keys
    assert length <= len(slots), f"{length} rows are to be read, there are {len(slots)}"
    return TableRead(seq_id, num_rows, slots[:length], pool.leading_run(seq_id, length))


def source_reads(pool: KVPool, laid_out: Sequence[SpanRows]) -> list[TableRead]:
    """What the rows of each span read of its sequence's source, all of it; nothing where there is none."""
    reads = []
    for rows in laid_out:
        source = pool.source_of(rows.seq_id)
        nothing = TableRead(rows.seq_id, rows.num_rows, rows.slots[:0], range(0))
        reads.append(nothing if source is None else table_read(pool, source, rows.num_rows))
    return reads


def lay_out(pool: KVPool, forests: dict[SeqId, PendingRows], spans: Sequence[Span]) -> list[SpanRows]:
    """Reserve the rows of every span. The result holds views of the slot tables: use it before the next change."""
    laid_out: list[SpanRows] = []
    first = 0
    for span in spans:
        seq_id, num_rows = span.seq_id, span.num_tokens
        assert num_rows > 0, "a span feeds at least one row"
        table, pending = pool.extend(seq_id, num_rows), forests[seq_id]
        pending.append(num_rows, span.parents)
        run, num_pending = table.run, pending.num_rows
        slots = table.slots[: table.num_rows] if run is None else None
        rows = SpanRows(seq_id, first, num_rows, table.num_rows - num_pending, num_pending, slots, run, pending)
        if table.num_dropped:
            rows.skipped = table.skipped
        laid_out.append(rows)
        first += num_rows
    assert len(spans) == 1 or len({span.seq_id for span in spans}) == len(spans), "a sequence feeds one span in a pass"
    return laid_out


def logit_rows(spans: Sequence[Span]) -> list[int]:
    """The pass's rows whose logits are asked for."""
    wanted: list[int] = []
    end = 0
    for span in spans:
        start, end = end, end + span.num_tokens
        if span.wanted is None:
            wanted.extend(range(end - span.num_logits, end))
        else:
            wanted.extend([start + row for row in span.wanted])
    return wanted


def rounded_logit_rows(wanted: Sequence[int], num_sequences: int, num_rows: int) -> np.ndarray:
    """`wanted`, filled up with row 0: to one row for each sequence if that is enough, else to all rows of the pass.
    Both numbers are rounded up, so that passes differ in two numbers of logits and not in as many as trees have."""
    size = num_sequences if len(wanted) <= num_sequences else num_rows
    rows = np.zeros(size, dtype=np.int64)
    rows[: len(wanted)] = wanted
    return rows
