"""The likeliest columns of rows of scores on CPU, by the kernel in `likeliest.cpp`. Knows no tokens and no requests."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.library import function


@cache
def _likeliest() -> Any:
    return function("likeliest_rows", *[c_void_p] * 4, *[c_int64] * 3)


def likeliest(raced: Tensor, scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The columns of the `width` largest numbers of each row of `raced`, best first and of equal ones the first, int64
    [n, width], and their log-probabilities under softmax(scores), float32 [n, width].

    Both are float32 [n, V], V at least `width`. A row of `scores` that has a NaN, or no finite largest number, has NaN
    for log-probabilities.
    """
    raced, scores = raced.contiguous(), scores.contiguous()
    assert raced.shape == scores.shape
    assert raced.dtype == scores.dtype == torch.float32
    count, size = raced.shape
    assert width <= size
    # NumPy keeps Python's lock while it allocates, PyTorch does not
    columns = torch.from_numpy(np.empty((count, width), dtype=np.int64))
    log_probs = torch.from_numpy(np.empty((count, width), dtype=np.float32))
    given = raced, scores, columns, log_probs
    _likeliest()(*map(Tensor.data_ptr, given), count, size, width)
    return columns, log_probs
