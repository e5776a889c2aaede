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
    """The rows of a pass: the SPAN_FIELDS of every span, whose `slots` and `parents` are the starts of a span's
    part in these two, and the slot of every row that writes. `slots` [any] are int64. The positions of the rows, of
    which the kernel has no use, are kept beside them."""

    __slots__ = ("_numbers", "_slots", "_written", "address", "of_positions")

    def __init__(
        self,
        spans: Sequence[int],
        slots: np.ndarray | None,
        parents: Sequence[int],
        written: Sequence[int],
        positions: Sequence[int] = (),
    ) -> None:
        sizes = len(written), len(spans) // len(SPAN_FIELDS)
        # one array with the record in front: an array of its own takes as long as all of these numbers
        numbers = array("q", (0, 0, 0, 0, *sizes, *spans, *parents, *written, *positions))
        self._numbers, self._slots = numbers, slots
        self._written = _PASS_RECORD + len(spans) + len(parents)
        self.address = address = numbers.buffer_info()[0]
        """Where the kernel finds the rows."""
        of_spans, of_written = address + _PASS_RECORD * _SIZE, address + self._written * _SIZE
        numbers[0], numbers[2], numbers[3] = of_spans, of_spans + len(spans) * _SIZE, of_written
        if slots is not None:
            numbers[1] = _address(slots)
        self.of_positions = of_written + len(written) * _SIZE
        """Address of the positions, int64."""

    @property
    def written(self) -> Tensor:
        """The slots of the rows that write, int64."""
        return torch.tensor(self._numbers[self._written : self._written + self._numbers[4]])

    def positions(self) -> Tensor:
        """Those of all rows, int64; the array's own memory."""
        first = (self.of_positions - self.address) // _SIZE
        count = len(self._numbers) - first
        if not count:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(self._numbers, dtype=torch.int64, count=count, offset=first * _SIZE)


def _address(numbers: np.ndarray) -> int:
    return numbers.__array_interface__["data"][0]  # half the time of `ctypes.data`


class ChainPass(NamedTuple):
    """One of several passes in which each row follows the one before: the SPAN_FIELDS of every span, then of every row
    the slot that it writes to and its position."""

    spans: list[int]
    written: list[int]
    positions: list[int]


class ChainRows:
    """The rows of several passes, one after the other, over the same `slots` [any], int64: the `first`, and behind it
    `num_later` in which each sequence feeds one row. The `second` pass is the first of these; in every other one the
    rows are one position and one slot on. `broken` has the slots of those sequences that are no run."""

    def __init__(
        self,
        first: ChainPass,
        second: ChainPass,
        num_later: int,
        slots: np.ndarray | None,
        broken: Mapping[int, Sequence[int]],
    ) -> None:
        self._first = PassRows(first.spans, slots, (), first.written, first.positions)
        self._later, addresses, positions = _later_passes(second, num_later, slots, broken)
        self.num_rows = [len(first.written)] + [len(second.written)] * num_later
        """How many rows each pass has."""
        self.positions = [self._first.of_positions, *positions]
        """Addresses of the positions of each pass, int64."""
        self.addresses = [self._first.address, *addresses]
        """Where the kernel finds the rows of each pass."""
        firsts, sizes = (first.spans[field :: len(SPAN_FIELDS)] for field in (_FIRST, _NUM_ROWS))
        self._ends = array("q", [start + size - 1 for start, size in zip(firsts, sizes, strict=True)])
        self.num_spans = len(firsts)
        self.ends = self._ends.buffer_info()[0]
        """Address of the last row of each span in the first pass, int64."""
        self.last_position = max(first.positions) if not num_later else max(second.positions) + num_later - 1
        """The largest of any row."""


def _later_passes(
    second: ChainPass, num_later: int, slots: np.ndarray | None, broken: Mapping[int, Sequence[int]]
) -> tuple[np.ndarray, Sequence[int], Sequence[int]]:
    """The numbers of `PassRows` of every pass from the second on, and the addresses of these and of their positions:
    they differ from pass to pass by the same numbers."""
    num_spans = len(second.written)
    of_spans, of_written = _PASS_RECORD, _PASS_RECORD + len(second.spans)
    of_positions = of_written + num_spans
    width = of_positions + num_spans
    base = np.array((0, 0, 0, 0, num_spans, num_spans, *second.spans, *second.written, *second.positions))
    added = np.zeros(width, dtype=np.int64)
    added[of_spans + _NUM_PENDING : of_written : len(SPAN_FIELDS)] = 1
    added[of_written:] = 1
    added[[0, 3]] = width * _SIZE
    numbers = np.empty((num_later, width), dtype=np.int64)
    address = _address(numbers)
    of_slots = 0 if slots is None else _address(slots)
    base[:4] = address + of_spans * _SIZE, of_slots, 0, address + of_written * _SIZE
    np.add(base, np.arange(num_later)[:, None] * added, out=numbers)
    for i, own in broken.items():
        numbers[:, of_written + i] = own
    addresses = range(address, address + num_later * width * _SIZE, width * _SIZE)
    first = address + of_positions * _SIZE
    return numbers, addresses, range(first, first + num_later * width * _SIZE, width * _SIZE)
