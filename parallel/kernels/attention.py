"""Attention of all sequences of a pass in one call per layer, by the kernel in `attention.cpp`.

Its records are those of the C++ source, field by field. Knows no layers and no pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int, c_int64, c_void_p, sizeof
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.library import library
from parallel.kernels.steps import Kernel, room

SPAN_FIELDS = ("first", "num_rows", "context", "num_pending", "run", "slots", "parents", "common")
_FIRST, _NUM_ROWS = 0, 1
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


class _PassRecord(Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("spans", "slots", "parents", "written")],
        *[(name, c_int64) for name in ("num_rows", "num_spans")],
    ]


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
    part in these two, and the slot of every row that writes. `slots` [any] are int64."""

    def __init__(
        self, spans: Sequence[int], slots: np.ndarray | None, parents: Sequence[int], written: Sequence[int]
    ) -> None:
        numbers = array("q", spans)
        numbers.extend(parents)
        numbers.extend(written)
        self._numbers, self._slots, self._num_written = numbers, slots, len(written)
        of_spans, size = numbers.buffer_info()[0], numbers.itemsize
        of_parents = of_spans + len(spans) * size
        of_written = of_parents + len(parents) * size
        of_slots = None if slots is None else slots.__array_interface__["data"][0]  # half the time of `ctypes.data`
        pointers = of_spans, of_slots, of_parents, of_written
        self._record = _PassRecord(*pointers, len(written), len(spans) // len(SPAN_FIELDS))
        self.address = addressof(self._record)

    @property
    def written(self) -> Tensor:
        """The slots of the rows that write, int64."""
        return torch.tensor(self._numbers[len(self._numbers) - self._num_written :])


class ChainPass(NamedTuple):
    """One of several passes in which each row follows the one before: the SPAN_FIELDS of every span, then of every row
    the slot that it writes to and its position."""

    spans: list[int]
    written: list[int]
    positions: list[int]


class ChainRows:
    """The rows of several passes, one after the other, over the same `slots` [any], int64."""

    def __init__(self, passes: Sequence[ChainPass], slots: np.ndarray | None) -> None:
        self._numbers = array("q", chain.from_iterable(chain.from_iterable(passes)))
        self._slots = slots
        self._records = (_PassRecord * len(passes))()
        self.num_rows = [len(one.written) for one in passes]
        """How many rows each pass has."""
        self.positions: list[int] = []
        """Addresses of the positions of each pass, int64."""
        of_slots = None if slots is None else slots.__array_interface__["data"][0]
        start, size = self._numbers.buffer_info()[0], self._numbers.itemsize
        for i, one in enumerate(passes):
            of_written = start + len(one.spans) * size
            sizes = len(one.written), len(one.spans) // len(SPAN_FIELDS)
            self._records[i] = _PassRecord(start, of_slots, None, of_written, *sizes)
            self.positions.append(of_written + len(one.written) * size)
            start = self.positions[-1] + len(one.positions) * size
        first, step = addressof(self._records), sizeof(_PassRecord)
        self.addresses = [first + i * step for i in range(len(passes))]
        """Where the kernel finds the rows of each pass."""
        firsts, sizes = (passes[0].spans[field :: len(SPAN_FIELDS)] for field in (_FIRST, _NUM_ROWS))
        self._ends = array("q", [first + size - 1 for first, size in zip(firsts, sizes, strict=True)])
        self.num_spans = len(firsts)
        self.ends = self._ends.buffer_info()[0]
        """Address of the last row of each span in the first pass, int64."""
        self.last_position = max(passes[-1].positions)
        """The largest of any row."""
