"""Gumbel noise on CPU, by the kernel in `noise.cpp`: standard Gumbel numbers of keys of 64 bits and tokens.

What the numbers are is said in `actors/sampling/noise.py`; the same keys and tokens have the same ones on every CPU
with kernels. Knows no text.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from parallel.kernels.library import function


@cache
def _gumbel() -> Any:
    return function("gumbel_rows", *[c_void_p] * 3, *[c_int64] * 2, c_int)


def has_noise() -> bool:
    """Whether the kernel can be had on this machine; compiles it at the first call."""
    return _gumbel() is not None


def gumbel_rows(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Keys int32 [n, 2], their high and low halves, and int64 tokens, [m] for all keys or [n, m]: float32 [n, m]."""
    keys, token_ids = keys.contiguous(), token_ids.contiguous()
    out, is_shared = torch.empty(len(keys), token_ids.shape[-1]), token_ids.dim() == 1
    assert (keys.dtype, token_ids.dtype) == (torch.int32, torch.int64)
    assert is_shared or len(token_ids) == len(keys)
    _gumbel()(keys.data_ptr(), token_ids.data_ptr(), out.data_ptr(), *out.shape, is_shared)
    return out
