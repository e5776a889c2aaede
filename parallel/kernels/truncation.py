"""Top-k, top-p and min-p of rows of scores on CPU, by the kernel in `truncation.cpp`. Knows no requests."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from parallel.kernels.library import function


@cache
def _truncate() -> Any:
    return function("truncate_rows", *[c_void_p] * 5, *[c_int64] * 2)


def truncate(scores: Tensor, top_ks: Tensor, top_ps: Tensor, shares: Tensor) -> Tensor:
    """float32 scores [n, V] after top-k (int32 [n], V or more: all), top-p (float64 [n], infinite: all) and min-p (the
    float32 logarithm [n], -inf: all): a tensor of their own, in which what a row does not keep is -inf.

    Tokens that tie with the last kept one are kept; masses are sums of float32 exponentials.
    """
    scores, out = scores.contiguous(), torch.empty(scores.shape)
    given = scores, top_ks, top_ps, shares
    assert [one.dtype for one in given] == [torch.float32, torch.int32, torch.float64, torch.float32]
    assert all(one.is_contiguous() and len(one) >= len(scores) for one in given)
    _truncate()(*map(Tensor.data_ptr, given), out.data_ptr(), *scores.shape)
    return out
