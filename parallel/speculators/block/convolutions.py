"""Convolutions of a block's rows along the block (DFlash 2); training and drafting both run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Convolution(Protocol):
    """Around one sublayer, before and after it, with weights that depend on its input."""

    def weights(self, x: Tensor) -> Tensor:
        """The sublayer's input [..., N, H] -> what is added to the weights, [..., N, 2, taps, groups], by side."""
        ...

    def __call__(self, x: Tensor, added: Tensor, side: int) -> Tensor:
        """Convolves before the sublayer (side 0) or after it (1)."""
        ...


def convolve(x: Tensor, kernel: Tensor, added: Tensor, block_size: int) -> Tensor:
    """x [..., N, H], blocks one after another, `kernel` [taps, H], `added` [..., N, taps, groups] -> [..., N, H].

    The weight of tap t is a constant of the channel plus what is added for its group of channels. With kernels 1, 0, ..
    and nothing added nothing changes.
    """
    num_rows, groups = x.shape[-2], added.shape[-1]
    within = torch.arange(num_rows, device=x.device)[:, None] % block_size
    out = torch.zeros_like(x)
    for tap in range(len(kernel)):
        weights = kernel[tap].view(groups, -1) + added[..., tap, :, None]
        earlier = x if not tap else F.pad(x, (0, 0, tap, 0))[..., :num_rows, :].masked_fill(within < tap, 0)
        out = out + weights.flatten(-2) * earlier
    return out


def convolved(
    x: Tensor, norm: Callable[[Tensor], Tensor], conv: Convolution, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    """The residual stream x after a sublayer with convolutions around it, which reads it normalised."""
    normed = norm(x)
    added = conv.weights(normed)
    return x + conv(sublayer(conv(normed, added, 0)), added, 1)
