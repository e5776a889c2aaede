"""Normalisation, sums and products of rows on CPU, by the kernels in `norms.cpp`. Knows no layers."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from parallel.kernels.library import library
from parallel.kernels.steps import Kernel, recording, room

_SHARED_OUT = 1 << 15
"""Numbers from which on PyTorch shares a sum out to threads of its own (`at::internal::GRAIN_SIZE`)."""


@cache
def _rms() -> Kernel:
    return Kernel("normalize_rms", *[c_void_p] * 3, *[c_int64] * 2, *[c_float] * 2, c_int, rows=3)


@cache
def _layer() -> Kernel:
    return Kernel("normalize_layer", *[c_void_p] * 4, *[c_int64] * 2, c_float, c_int, rows=4)


@cache
def _add() -> Kernel:
    return Kernel("add_rows", *[c_void_p] * 3, *[c_int64] * 2, c_int, rows=3)


@cache
def _weigh() -> Kernel:
    return Kernel("weigh_rows", *[c_void_p] * 3, *[c_int64] * 2, c_int, rows=3)


def has_norms() -> bool:
    """Whether the kernels can be had on this machine; compiles them at the first call."""
    return library() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x / rms(x) * (weight + offset) along the last axis; all float32 or all bfloat16, computed in float32."""
    x, size = x.contiguous(), len(weight)
    out = _like(x)
    _rms()(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, offset, _is_bfloat(x, weight))
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean(x)) / deviation(x) * weight + bias along the last axis; all float32 or all bfloat16, in float32."""
    x, size = x.contiguous(), len(weight)
    out = _like(x)
    pointers = x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr()
    _layer()(*pointers, x.numel() // size, size, eps, _is_bfloat(x, weight))
    return out


def _like(x: Tensor) -> Tensor:
    """Room for a result of the shape and type of x."""
    return torch.empty_like(x) if recording() is None else room(len(x), x.shape[-1], x.dtype)


def _is_bfloat(x: Tensor, weight: Tensor) -> bool:
    assert x.dtype == weight.dtype, f"rows of {x.dtype} for weights of {weight.dtype}"
    return x.dtype == torch.bfloat16


def add_rows(x: Tensor, added: Tensor) -> Tensor:
    """x + added [T, H], to the bit as PyTorch adds them, with the kernels' threads.

    PyTorch's are others: on cores where the kernels' threads still wait for their next part, they come late.
    """
    if (x.numel() < _SHARED_OUT and recording() is None) or not x.is_cpu or not _can_add(x, added):
        return x + added
    x, added = x.contiguous(), added.contiguous()
    out, size = _like(x), x.shape[-1]
    _add()(x.data_ptr(), added.data_ptr(), out.data_ptr(), x.numel() // size, size, x.dtype == torch.bfloat16)
    return out


def weigh_rows(x: Tensor, weights: Tensor) -> Tensor:
    """x [T, H] * weights [T, 1], to the bit as PyTorch multiplies them; by the kernel where it is being recorded."""
    if recording() is None:
        return x * weights
    assert x.dtype == weights.dtype, f"rows of {x.dtype} for weights of {weights.dtype}"
    x, weights, out = x.contiguous(), weights.contiguous(), _like(x)
    _weigh()(x.data_ptr(), weights.data_ptr(), out.data_ptr(), len(x), x.shape[1], x.dtype == torch.bfloat16)
    return out


def _can_add(x: Tensor, added: Tensor) -> bool:
    """Whether the kernel adds these: of one type that it knows, and outside of training."""
    is_alike = (x.dtype, x.shape) == (added.dtype, added.shape) and x.dtype in (torch.float32, torch.bfloat16)
    return is_alike and not (x.requires_grad or added.requires_grad) and has_norms()
