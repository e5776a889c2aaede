"""Attention of all sequences of a pass in one call per layer, by the kernel in `attention.cpp`.

Its records are those of the C++ source, field by field. Knows no layers and no pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from ctypes import Structure, addressof, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.library import library
from parallel.kernels.steps import Kernel, room

SPAN_FIELDS = ("first", "num_rows", "context", "num_pending", "run", "slots", "parents", "common")
_FIRST, _NUM_ROWS, _NUM_PENDING = 0, 1, 3
CHAIN, READS = -1, -2
"""Instead of where a span's parents start: each row follows the one before; rows see the `context` rows of another
table, and nothing is pending."""
FOREST = -1
"""`common` of a span whose rows see their ancestors. Else it is the number of leading pending rows that all rows
find at the same place, and `parents` starts three numbers of every pending row: shared, first, last. It sees pending
rows 0 to shared - 1 and first to last - 1, in this order; where the second range is not empty, shared is `common`."""


class _LayerRecord(Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("keys", "values", "q_norm", "k_norm", "bias", "buckets")],
        *[(name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "window", "furthest")],
        *[(name, c_float) for name in ("scale", "softcap", "norm_eps", "norm_offset")],
    ]


_PASS_RECORD = 6
"""Numbers of the record of a pass: the addresses of its spans, slots, parents and written slots, then how many rows and
spans there are."""
_SIZE = array("q").itemsize


@cache
def _kernel() -> Kernel:
    return Kernel("attend_rows", *[c_void_p] * 6, c_int)


@cache
def _reading_kernel() -> Kernel:
    return Kernel("read_rows", *[c_void_p] * 4, c_int)


def has_attention() -> bool:
    """Whether the kernel can be had on this machine; compiles it at the first call."""
    return library() is not None


def takes_heads(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel multiplies numbers of this type: of bfloat16 it takes two of a head at a time."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and head_dim % 2 == 0)


class LayerCall:
    """One layer's attention: `keys` and `values` [slots, num_kv_heads, head_dim], its query heads, and the weights of
    the heads' norms, which scale by weight + `norm_offset`: all of one type that `takes_heads`. `window` 0 and
    `softcap` 0 are none. `bias`: a table [buckets, num_heads], which is added to the scores, and int64 [distances], the
    bucket of each distance; the last one is that of all beyond."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        num_heads: int,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        norms: tuple[Tensor, Tensor] | None = None,
        norm_eps: float = 0.0,
        norm_offset: float = 0.0,
        bias: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._tensors = keys, values, norms, bias  # whose addresses the record has
        _, num_kv_heads, head_dim = keys.shape
        assert takes_heads(keys.dtype, head_dim), f"heads of {head_dim} numbers of {keys.dtype}"
        assert all(norm.dtype == keys.dtype for norm in norms or ())
        assert bias is None or (bias[0].dtype == keys.dtype and bias[0].is_contiguous() and not softcap)
        self._is_bfloat = keys.dtype == torch.bfloat16
        q_norm, k_norm = (norm.data_ptr() for norm in norms) if norms else (None, None)
        table, buckets = (part.data_ptr() for part in bias) if bias else (None, None)
        self._record = _LayerRecord(
            keys.data_ptr(),
            values.data_ptr(),
            q_norm,
            k_norm,
            table,
            buckets,
            num_heads,
            num_kv_heads,
            head_dim,
            window,
            len(bias[1]) - 1 if bias else 0,
            scale,
            softcap,
            norm_eps,
            norm_offset,
        )
        self._address = addressof(self._record)
        self._width = num_heads * head_dim

    def attend(self, rows: PassRows, projected: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """projected [T, (num_heads + 2 num_kv_heads) * head_dim] -> [T, num_heads * head_dim], in the type of the keys.

        Keys and values go to their slots; queries are normalised and rotated in place. Rows of no span are not set.
        """
        out = room(projected.shape[0], self._width, projected.dtype)
        cos, sin = (None, None) if rotation is None else (rotation[0].data_ptr(), rotation[1].data_ptr())
        _kernel()(self._address, rows.address, projected.data_ptr(), cos, sin, out.data_ptr(), self._is_bfloat)
        return out

    def read(self, rows: PassRows, queries: Tensor) -> Tensor:
        """queries [T, num_heads * head_dim] of spans that all read, in the type of the keys -> as many; 0 for a table
        without rows. Nothing is written."""
        queries = queries.contiguous()
        out = room(len(queries), self._width, queries.dtype)
        _reading_kernel()(self._address, rows.address, queries.data_ptr(), out.data_ptr(), self._is_bfloat)
        return out


class PassRows:
    """The rows of a pass: the SPAN_FIELDS of every span, whose `slots` and `parents` are the starts of a span's part in
    these two, and the slot of every row that writes. `slots` are tables, int64 [any], which stand one after the other.
    The positions of the rows, of which the kernel has no use, are kept beside them."""

    __slots__ = ("_num_positions", "_numbers", "_written", "address", "of_positions", "of_slots")

    def __init__(
        self,
        spans: Sequence[int],
        slots: Sequence[np.ndarray],
        parents: Sequence[int],
        written: Sequence[int],
        positions: Sequence[int] = (),
    ) -> None:
        num_written = len(written)
        sizes = num_written, len(spans) // len(SPAN_FIELDS)
        # one array with the record in front: an array of its own takes as long as all of these numbers
        self._numbers = numbers = array("q", (0, 0, 0, 0, *sizes, *spans, *parents, *written, *positions))
        before_slots = _append(numbers, slots)
        self.address = address = numbers.buffer_info()[0]
        """Where the kernel finds the rows."""
        of_spans = address + _PASS_RECORD * _SIZE
        of_parents = of_spans + len(spans) * _SIZE
        self._written = of_written = of_parents + len(parents) * _SIZE
        self.of_slots = address + before_slots
        """Address of the slots, int64."""
        numbers[0], numbers[1], numbers[2], numbers[3] = of_spans, self.of_slots, of_parents, of_written
        self.of_positions = of_written + num_written * _SIZE
        """Address of the positions, int64."""
        self._num_positions = len(positions)

    @property
    def written(self) -> Tensor:
        """The slots of the rows that write, int64."""
        first = (self._written - self.address) // _SIZE
        return torch.tensor(self._numbers[first : first + self._numbers[4]])

    def positions(self) -> Tensor:
        """Those of all rows, int64; the array's own memory."""
        if not self._num_positions:
            return torch.empty(0, dtype=torch.int64)
        offset = self.of_positions - self.address
        return torch.frombuffer(self._numbers, dtype=torch.int64, count=self._num_positions, offset=offset)


def _append(numbers: array, slots: Sequence[np.ndarray]) -> int:
    """Put the slots of these tables, int64, behind the numbers; returns how many bytes are in front of them."""
    before = len(numbers) * _SIZE
    for table in slots:
        numbers.frombytes(table.tobytes())
    return before


class ChainPass(NamedTuple):
    """One of several passes in which each row follows the one before: the SPAN_FIELDS of every span, then of every row
    the slot that it writes to and its position."""

    spans: list[int]
    written: list[int]
    positions: list[int]


class ChainRows:
    """The rows of several passes, one after the other, over the same `slots`: the `first`, and behind it `num_later` in
    which each sequence feeds one row. The `second` pass is the first of these; in every other one the rows are one
    position and one slot on. `broken` has the slots of those sequences that are no run."""

    def __init__(
        self,
        first: ChainPass,
        second: ChainPass,
        num_later: int,
        slots: Sequence[np.ndarray],
        broken: Mapping[int, Sequence[int]],
    ) -> None:
        self._first = PassRows(first.spans, slots, (), first.written, first.positions)
        num_spans = len(first.spans) // len(SPAN_FIELDS)
        spans, written, positions = [*second.spans], [*second.written], [*second.positions]
        numbers: list[int] = []
        for step in range(num_later):
            if step:
                spans[_NUM_PENDING :: len(SPAN_FIELDS)] = [one + 1 for one in spans[_NUM_PENDING :: len(SPAN_FIELDS)]]
                written, positions = [one + 1 for one in written], [one + 1 for one in positions]
                for i, own in broken.items():
                    written[i] = own[step]
            numbers += (0, 0, 0, 0, num_spans, num_spans, *spans, *written, *positions)
        self._later = array("q", numbers)
        width = (_PASS_RECORD + len(spans) + 2 * num_spans) * _SIZE
        address, of_slots = self._later.buffer_info()[0], self._first.of_slots
        of_spans, of_written = _PASS_RECORD * _SIZE, (_PASS_RECORD + len(spans)) * _SIZE
        addresses = range(address, address + num_later * width, width)
        for i, at in enumerate(addresses):
            record = i * width // _SIZE
            self._later[record], self._later[record + 1] = at + of_spans, of_slots
            self._later[record + 3] = at + of_written
        self.num_rows = [len(first.written)] + [num_spans] * num_later
        """How many rows each pass has."""
        self.addresses = [self._first.address, *addresses]
        """Where the kernel finds the rows of each pass."""
        of_positions = of_written + num_spans * _SIZE
        self.positions = [self._first.of_positions, *[at + of_positions for at in addresses]]
        """Addresses of the positions of each pass, int64."""
        firsts, sizes = first.spans[_FIRST :: len(SPAN_FIELDS)], first.spans[_NUM_ROWS :: len(SPAN_FIELDS)]
        self._ends = array("q", [start + size - 1 for start, size in zip(firsts, sizes, strict=True)])
        self.num_spans = num_spans
        self.ends = self._ends.buffer_info()[0]
        """Address of the last row of each span in the first pass, int64."""
        self.last_position = max(positions or first.positions)
        """The largest of any row."""
