"""Normalisation layers, replicated on every rank. RMSNorm: arXiv 1910.07467; LayerNorm: arXiv 1607.06450."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kernels import triton_launch
from parallel.kernels.norms import add_rows, has_norms, layer_norm, rms_norm
from parallel.model.config import NormKind
from parallel.model.layers.weight import EVERY, Layer, Shard, TensorOptions


class RMSNorm(Layer):
    """Scaled by weight + `offset`, along the last axis, in float32."""

    offset = 0.0
    uses_triton = False

    def __init__(self, hidden: int, eps: float, **options: Unpack[TensorOptions]) -> None:
        self.hidden = hidden
        self.eps = eps
        self.weight = torch.empty(hidden, **options)
        self._eps = torch.tensor(eps, dtype=torch.float32, device=options["device"])
        self.has_kernel = _has_kernel(options)

    def __call__(self, x: Tensor) -> Tensor:
        if self.uses_triton:
            return triton_launch.rms_norm(x, self.weight, self.eps, self.offset)[1]
        if self.has_kernel:
            return rms_norm(x, self.weight, self.eps, self.offset)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=1 / self.hidden).rsqrt_()
        return self._weighted(x, x * scale)

    def after_sum(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """x + added, and that normalised."""
        if self.uses_triton:
            return triton_launch.rms_norm(x, self.weight, self.eps, self.offset, added)
        x = add_rows(x, added)
        return x, self(x)

    def _weighted(self, x: Tensor, normed: Tensor) -> Tensor:
        return normed.to(x.dtype) * self.weight

    def shards(self, name: str) -> Iterator[Shard]:
        yield Shard(f"{name}.weight", (EVERY,), self.weight)


class RMSNormPlusOne(RMSNorm):
    """Scaled by 1 + weight, in float32."""

    offset = 1.0

    def _weighted(self, x: Tensor, normed: Tensor) -> Tensor:
        return torch.addcmul(normed, normed, self.weight).to(x.dtype)


class LayerNorm(Layer):
    def __init__(self, hidden: int, eps: float, **options: Unpack[TensorOptions]) -> None:
        self.hidden = hidden
        self.weight = torch.empty(hidden, **options)
        self.bias = torch.empty(hidden, **options)
        self._eps = eps
        self.has_kernel = _has_kernel(options)

    def __call__(self, x: Tensor) -> Tensor:
        if self.has_kernel:
            return layer_norm(x, self.weight, self.bias, self._eps)
        return F.layer_norm(x, (self.hidden,), self.weight, self.bias, self._eps)

    def after_sum(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        x = add_rows(x, added)
        return x, self(x)

    def shards(self, name: str) -> Iterator[Shard]:
        yield Shard(f"{name}.weight", (EVERY,), self.weight)
        yield Shard(f"{name}.bias", (EVERY,), self.bias)


_KERNEL_TYPES = (torch.float32, torch.bfloat16)


def _has_kernel(options: TensorOptions) -> bool:
    return torch.device(options["device"]).type == "cpu" and options["dtype"] in _KERNEL_TYPES and has_norms()


Norm = RMSNorm | LayerNorm
NORMS: dict[NormKind, type[RMSNorm] | type[LayerNorm]] = {
    "rms": RMSNorm,
    "rms_plus_one": RMSNormPlusOne,
    "layer": LayerNorm,
}
