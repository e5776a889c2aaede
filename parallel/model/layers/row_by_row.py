"""Functions of numbers on a CPU, row by row: PyTorch computes most of a tensor in vectors and what is left singly, by
other formulas for exp and tanh, so that a number's last bit may depend on where its row lies. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The function of each row of x [T, n], each in a call of its own; on a GPU, where every number takes the same
    instructions, of all."""
    if x.device.type != "cpu" or len(x) < 2:
        return function(x.contiguous())
    return torch.cat([function(row.contiguous()) for row in x.split(1)])
