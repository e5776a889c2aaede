"""Root-mean-square normalisation (arXiv 1910.07467), scaled in float32 and replicated on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parallel.model.layers.linear import Shard
from parallel.model.layers.weight import Layer


class RMSNorm(Layer):
    """Along the last axis; few and cheap operations, since a decoder has two per layer and rows are few."""

    def __init__(self, hidden: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.hidden = hidden
        self.weight = torch.empty(hidden, dtype=dtype, device=device)
        self._eps = torch.tensor(eps, dtype=torch.float32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=1 / self.hidden).rsqrt_()
        return (x * scale).to(x.dtype) * self.weight

    def shards(self, name: str) -> Iterator[Shard]:
        yield Shard(f"{name}.weight", (self.hidden,), (slice(0, self.hidden),), self.weight)
