"""What makes one vector of a token's taps: a projection, with norms before or after it.

It needs nothing else of its speculator, so it may run where the taps are, and one vector travels in place of all taps.
Knows no speculator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from parallel.comm.group import Group
from parallel.model.layers.linear import RowLinear
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.weight import EVERY, Layer, Shard, TensorOptions
from parallel.speculators.config import FuserShape


class WholeRowsLinear(RowLinear):
    """A projection whose input every rank has whole: each multiplies its columns, and the sum goes to all."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x if self.group.size == 1 else x[:, self.columns].contiguous())

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield self.weight.shard(f"{prefix}.weight", EVERY, self.columns)
        if self.bias is not None:
            yield Shard(f"{prefix}.bias", (EVERY,), self.bias)


class TapFuser(Layer):
    """Weights are allocated uninitialised."""

    def __init__(self, shape: FuserShape, group: Group, **options: Unpack[TensorOptions]) -> None:
        self.shape = shape
        self.dtype = options["dtype"]
        taps = range(shape.num_taps) if shape.tap_norms else ()
        self.features_norm = RMSNorm(shape.inputs, shape.eps, **options) if shape.features_norm else None
        self.tap_norms = [RMSNorm(shape.tap_size, shape.eps, **options) for _ in taps]
        self.projection = WholeRowsLinear("", shape.inputs, shape.outputs, group, bias=False, **options)
        self.result_norm = RMSNorm(shape.outputs, shape.eps, **options) if shape.result_norm else None

    def __call__(self, features: Tensor) -> Tensor:
        """Taps side by side, [T, F] of any type -> [T, H]."""
        features = features.to(self.dtype)
        if self.features_norm is not None:
            features = self.features_norm(features)
        if self.tap_norms:
            taps = features.split(self.shape.tap_size, 1)
            features = torch.cat([norm(tap.contiguous()) for norm, tap in zip(self.tap_norms, taps, strict=True)], 1)
        fused = self.projection(features)
        return fused if self.result_norm is None else self.result_norm(fused)

    def shards(self) -> Iterator[Shard]:
        shape = self.shape
        yield from self.projection.shards(shape.projection)
        for i, norm in enumerate(self.tap_norms):
            yield from norm.shards(f"{shape.tap_norms}.{i}")
        for norm, name in ((self.features_norm, shape.features_norm), (self.result_norm, shape.result_norm)):
            if norm is not None:
                yield from norm.shards(name)
