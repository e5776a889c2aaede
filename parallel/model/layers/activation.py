"""Functions of single numbers between the products of a layer: activations, alone or as gates, soft caps and factors.

On a CPU by the kernel of `parallel/kernels/activations.py`, whose results depend on nothing beside a number; elsewhere
and in training by PyTorch. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kernels.activations import map_rows, maps_rows
from parallel.model.config import Activation

_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activated(activation: Activation, x: Tensor) -> Tensor:
    """The activation of each number of x [T, n]."""
    return map_rows(activation, x) if maps_rows(x) else _FUNCTIONS[activation](x)


def gated(activation: Activation, x: Tensor, *, apart: bool = False) -> Tensor:
    """x [T, 2 n]: gates, then what they weigh -> the activation of the gates times the others, [T, n].

    `apart`: with the same bits whatever rows are beside, on a GPU too."""
    if maps_rows(x):
        return map_rows(activation, x, gated=True)
    gate, up = x.chunk(2, -1)
    # the gates of one row are contiguous, those of several are not: on a GPU PyTorch has a kernel for each
    return _FUNCTIONS[activation](gate.contiguous() if apart else gate).mul_(up)


def sigmoid(x: Tensor) -> Tensor:
    """x [T, n] -> 1 / (1 + exp(-x))."""
    return map_rows("sigmoid", x) if maps_rows(x) else torch.sigmoid(x)


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """x [T, n], bounded: cap * tanh(x / cap)."""
    return map_rows("soft_cap", x, cap) if maps_rows(x) else torch.tanh(x / cap) * cap


def scaled(x: Tensor, factor: float) -> Tensor:
    """x [T, n] * factor."""
    return map_rows("scale", x, factor) if maps_rows(x) else x * factor
