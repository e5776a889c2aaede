"""Functions of single numbers on CPU, by the kernel in `activations.cpp`: a row's results do not depend on the other
rows of the call, to the bit. Knows no layers."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from parallel.kernels.library import library
from parallel.kernels.steps import Kernel, room

Function = Literal["relu", "silu", "gelu", "gelu_pytorch_tanh", "sigmoid", "soft_cap", "scale"]
"""Soft caps are factor * tanh(x / factor), scales x * factor; the others have no factor."""
ORDER: tuple[Function, ...] = ("relu", "silu", "gelu", "gelu_pytorch_tanh", "sigmoid", "soft_cap", "scale")
"""The functions by their numbers in `activations.cpp`."""


@cache
def _map() -> Kernel:
    return Kernel("map_rows", *[c_void_p] * 2, *[c_int64] * 2, c_float, *[c_int] * 3, rows=2)


def maps_rows(x: Tensor) -> bool:
    """Whether the kernel computes functions of these numbers: of a type that it knows, and outside of training."""
    is_known = x.is_cpu and x.dtype in (torch.float32, torch.bfloat16) and not x.requires_grad
    return is_known and library() is not None


def map_rows(function: Function, x: Tensor, factor: float = 0.0, *, gated: bool = False) -> Tensor:
    """The function of each number of x [T, n], computed in float32; `gated`: of the first half of each row, times the
    second one, [T, n / 2]."""
    x = x.contiguous()
    num_rows, size = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = room(num_rows, size, x.dtype)
    kind = ORDER.index(function)
    _map()(x.data_ptr(), out.data_ptr(), num_rows, size, factor, kind, gated, x.dtype == torch.bfloat16)
    return out
