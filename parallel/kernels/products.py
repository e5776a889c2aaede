"""Products of a few rows with a matrix on CPU, by the kernel in `products.cpp`.

A weight is read once whatever the number of rows, and a row's results do not depend on the other rows of the call, to
the bit: a token gets the same logits alone and beside draft tokens. Knows no layers.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from parallel.kernels.library import function

_STORED = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


@cache
def _kernel() -> Any:
    return function("multiply_rows", *[c_void_p] * 6, *[c_int64] * 3, c_int, c_int)


def has_products() -> bool:
    """Whether the kernel can be had on this machine; compiles it at the first call."""
    return _kernel() is not None


def product(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    addend: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """x [T, inputs] @ matrix [outputs, inputs].T * scales + bias + addend, in float32; all tensors contiguous.

    The matrix is float32, bfloat16, or int8 with a scale for every output. `gated`: its first half are the gates'
    outputs, and the result [T, outputs / 2] is silu(gates) * others (+ addend).
    """
    num_rows, inputs = x.shape
    outputs = matrix.shape[0]
    out = torch.empty(num_rows, outputs // 2 if gated else outputs)
    _kernel()(
        x.data_ptr(),
        matrix.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if addend is None else addend.data_ptr(),
        out.data_ptr(),
        num_rows,
        inputs,
        outputs,
        _STORED[matrix.dtype],
        gated,
    )
    return out
