"""Root-mean-square normalisation (arXiv 1910.07467), computed in float32 and replicated on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from parallel.layers.linear import Shard, frozen


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """x [..., H] -> float32 [..., H] with mean square one along the last axis."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    def __init__(self, hidden: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.hidden = hidden
        self.eps = eps
        self.weight = frozen(hidden, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * rms_normalize(x, self.eps).to(x.dtype)

    def shards(self, name: str) -> Iterator[Shard]:
        yield Shard(f"{name}.weight", (self.hidden,), (slice(0, self.hidden),), self.weight)
