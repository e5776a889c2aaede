"""Products of rows with a matrix on CPU, by the kernels in `products.cpp`.

The matrix lies in panels of 16 outputs, in the order in which a product reads it. A row's results do not depend on the
other rows of the call, to the bit: a token gets the same logits alone, beside draft tokens and in a prompt.

Rows of bfloat16 are multiplied by a matrix of bfloat16, two inputs at a time: to a float32 sum, which starts at zero,
the product of the second and then that of the first is added, pair after pair, each sum rounded to the nearest float32.
That is what the instruction VDPBF16PS does (measured on Zen 4, two million random sums), and what two multiply-adds do
where there is none; numbers below 2^-126 may count as zero.

Where the processor and the system give AMX (`has_tiles`), it multiplies by matrices of bfloat16, whatever the number of
rows. Of 32 inputs after 32 the products of the even ones are added up, from zero on, and those of the odd ones, then
both sums are added to each other and that to the sum before; each sum is rounded to the nearest float32, and numbers
below 2^-126 are zero: TDPBF16PS (measured on a Xeon, four million random sums). A row of float32 is then the sum of
three of bfloat16, each the first eight binary digits of what those before it leave; each is multiplied by itself, and
the sum of the last and the second product, which are small, is added to the first. What is not finite is whole in the
first; digits below 2^-126 are lost.

For a matrix of int8 rows may be rounded too, each to whole multiples of its largest number / 127 (`multiply_rounded`
is the definition). The products of these integers add up to an int32; their order changes nothing. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kernels import pages
from parallel.kernels.library import function, library
from parallel.kernels.steps import Kernel, room

PANEL = 16
LARGEST_CODE = 127
MOST_INPUTS = (2**31 - 1) // LARGEST_CODE**2
"""The inputs of a product of rounded rows: an int32 holds the sum of so many products of the largest codes."""
_SMALLEST = 1e-30
_STORED = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_PAIRS = 3
_ROUNDED = {torch.float32: 4, torch.bfloat16: 5}
_PER_STEP = {_STORED[torch.bfloat16]: 2, _PAIRS: 2, **dict.fromkeys(_ROUNDED.values(), 4)}
"""Inputs that are multiplied at a time; one where nothing is said."""


@cache
def _multiply() -> Kernel:
    return Kernel("multiply_rows", *[c_void_p] * 6, *[c_int64] * 3, *[c_int] * 3, rows=6)


@cache
def _gather() -> Kernel:
    return Kernel("gather_rows", *[c_void_p] * 4, *[c_int64] * 3, c_int, rows=4)


@cache
def _pack() -> Callable[..., Any] | None:
    return function("pack_panels", *[c_void_p] * 2, *[c_int64] * 2, c_int)


def has_products() -> bool:
    """Whether this machine has the kernels; compiles them at the first call."""
    return library() is not None


def has_tiles() -> bool:
    """Whether the kernels multiply by AMX here."""
    find, found = function("find_tiles", c_void_p), c_int64()
    if find is not None:
        find(byref(found))
    return bool(found.value)


class Panels:
    """A matrix [outputs, inputs] of float32, bfloat16, or int8 with a factor for every output, to multiply rows of
    float32 by; or of bfloat16, for rows of bfloat16; or of int8, for rows of either that it `rounds`.

    `weights` holds it; its `nbytes` leaves out the zeros that fill up panels and steps. `at` are the addresses of it
    and of the factors, and `stored` is the type, as the kernel takes them.
    """

    def __init__(
        self,
        matrix: Tensor,
        scales: Tensor | None = None,
        rows: torch.dtype = torch.float32,
        *,
        rounds: bool = False,
    ) -> None:
        pack = _pack()
        assert pack is not None, "ask has_products first"
        self._multiply, self._gather, self._pack = _multiply(), _gather(), pack
        self.outputs, self.inputs = matrix.shape
        self.gates = self.outputs % (2 * PANEL) == 0
        """Whether `multiply` can take the first half of the outputs for gates: they fill whole panels."""
        self.dtype = rows
        if rounds:
            assert matrix.dtype == torch.int8, "rounded rows are multiplied by integers"
            assert self.inputs <= MOST_INPUTS, f"{self.inputs} inputs may add up to more than an int32 holds"
            self.stored = _ROUNDED[rows]
        else:
            assert rows == torch.float32 or rows == matrix.dtype == torch.bfloat16, f"{rows} times {matrix.dtype}"
            self.stored = _STORED[matrix.dtype] if rows == torch.float32 else _PAIRS
        self._padding = -self.inputs % _PER_STEP.get(self.stored, 1)
        width = self.inputs + self._padding
        size = -(-self.outputs // PANEL) * PANEL * width
        self.weights = pages.empty(size, matrix.dtype)[: matrix.numel()]
        self.scales = scales
        self.at = self.weights.data_ptr(), None if scales is None else scales.data_ptr()
        self.assign(matrix)

    @property
    def fills_rows(self) -> bool:
        """Whether rows are filled up with zeros before the kernel has them."""
        return self.stored not in _ROUNDED.values() and self._padding > 0

    def assign(self, matrix: Tensor) -> None:
        """Replace the contents by a matrix of the same shape and type."""
        assert matrix.shape == (self.outputs, self.inputs), f"{tuple(matrix.shape)} is not this matrix's shape"
        matrix = self._padded(matrix)
        self._pack(matrix.data_ptr(), self.at[0], matrix.shape[1], self.outputs, self.stored)

    def _padded(self, rows: Tensor) -> Tensor:
        """Contiguous rows with whole steps of inputs."""
        return F.pad(rows, (0, self._padding)) if self._padding else rows.contiguous()

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        largest: Tensor | None = None,
        gated: bool = False,
        wide: bool = False,
    ) -> Tensor:
        """x [T, inputs] -> x @ matrix.T + bias, [T, outputs], all of the type of rows, with sums in float32; `wide`
        returns them unrounded.

        `gated`: half of the outputs are gates, the other half is multiplied by their silu: [T, outputs / 2]. `largest`
        as in `multiply_rounded`.
        """
        assert x.shape[1] == self.inputs, f"rows of {x.shape[1]} for a matrix of {self.inputs} inputs"
        assert x.dtype == self.dtype, f"rows of {x.dtype} for a matrix for {self.dtype}"
        x = self._padded(x) if self.fills_rows else x.contiguous()
        columns = self.outputs // 2 if gated else self.outputs
        out = room(x.shape[0], columns, torch.float32 if wide else x.dtype)
        self._multiply(
            x.data_ptr(),
            *self.at,
            None if bias is None else bias.data_ptr(),
            None if largest is None else largest.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            self.outputs,
            self.stored,
            gated,
            wide,
        )
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """ids [T] -> those rows of the matrix, of the type of rows, [T, inputs]."""
        ids, width = ids.contiguous(), self.inputs + self._padding
        out = room(len(ids), width, self.dtype)
        self._gather(*self.at, ids.data_ptr(), out.data_ptr(), len(ids), width, self.outputs, self.stored)
        return out[:, : self.inputs].contiguous() if self._padding else out


@cache
def _look_up() -> Kernel:
    return Kernel("look_up_rows", *[c_void_p] * 4, *[c_int64] * 3, *[c_int] * 2, rows=4)


def look_up_rows(matrix: Tensor, scales: Tensor | None, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """ids [T] -> those rows of a contiguous matrix [outputs, inputs] that is not packed, times the factors of the
    outputs, of type `dtype`: [T, inputs]."""
    ids, out = ids.contiguous(), room(len(ids), matrix.shape[1], dtype)
    at_scales = None if scales is None else scales.data_ptr()
    kinds = _STORED[matrix.dtype], dtype == torch.bfloat16
    _look_up()(
        matrix.data_ptr(), at_scales, ids.data_ptr(), out.data_ptr(), len(ids), matrix.shape[1], len(matrix), *kinds
    )
    return out


def multiply_rounded(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, largest: Tensor | None = None
) -> Tensor:
    """x [T, inputs], rounded, times int8 codes [outputs, inputs] with a factor `scales` [outputs] -> [T, outputs].

    A row becomes whole multiples of its largest number / 127, the nearest ones, of two equally near the even one. The
    sum of the products of integers, rounded to float32, is multiplied by the row's factor and then by the output's.
    `largest` float32 [T, 1]: of rows that x has only parts of. The same bits as `Panels`, without a compiler.
    """
    numbers = x.float()
    if largest is None:
        largest = numbers.abs().amax(1, keepdim=True)
    largest = largest.clamp(min=_SMALLEST)
    rounded = (numbers * (torch.full_like(largest, LARGEST_CODE) / largest)).round_()
    sums = rounded.double() @ codes.double().T  # exact: integers below 2^53
    out = sums.float() * (largest / LARGEST_CODE) * scales
    return (out if bias is None else out + bias.float()).to(x.dtype)
