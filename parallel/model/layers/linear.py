"""Linear layers whose weight is sharded over a group of ranks.

A column layer gives every rank some outputs, a row layer takes some inputs from every rank and sums; a column layer
followed by a row layer needs one all-reduce (Megatron-LM, arXiv 1909.08053, section 3). Knows no models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from parallel.comm.group import Group
from parallel.kernels import triton_launch
from parallel.model.layers.weight import EVERY, Layer, Shard, TensorOptions, Weight

OutputShare = tuple[str, slice]
"""One of the fused outputs of a column layer: its name, and the rows of it that this rank has."""


def even_rows(size: int, group: Group) -> slice:
    """This rank's contiguous share of `size` outputs or inputs, which the group's size divides."""
    assert size % group.size == 0, f"{size} cannot be split over {group.size} ranks"
    share = size // group.size
    return slice(group.rank * share, (group.rank + 1) * share)


class ColumnLinear(Layer):
    """[T, inputs] -> [T, this rank's outputs of all parts, fused]."""

    uses_triton = False

    def __init__(self, inputs: int, parts: list[OutputShare], *, bias: bool, **options: Unpack[TensorOptions]) -> None:
        self.parts = parts
        outputs = sum(rows.stop - rows.start for _, rows in parts)
        self.weight = Weight(outputs, inputs, **options)
        self.bias = torch.empty(outputs, **options) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.multiply(x, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        """The product has two parts; returns silu of the first times the second."""
        if self.uses_triton:
            return triton_launch.gated(self(x))
        return self.weight.multiply_gated(x, self.bias)

    def shards(self, prefix: str) -> Iterator[Shard]:
        start = 0
        for name, rows in self.parts:
            stop = start + rows.stop - rows.start
            yield self.weight.shard(f"{prefix}.{name}.weight", rows, own=slice(start, stop))
            if self.bias is not None:
                yield Shard(f"{prefix}.{name}.bias", (rows,), self.bias[start:stop])
            start = stop


class RowLinear(Layer):
    """[T, this rank's inputs] -> [T, outputs], summed over the group."""

    def __init__(
        self, name: str, inputs: int, outputs: int, group: Group, *, bias: bool, **options: Unpack[TensorOptions]
    ) -> None:
        self.name = name
        self.group = group
        self.columns = even_rows(inputs, group)
        self.weight = Weight(outputs, inputs // group.size, **options)
        # only rank 0 holds the bias, so that the sum over the ranks has it once
        self.bias = torch.empty(outputs, **options) if bias and group.rank == 0 else None

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.share(x))

    def share(self, x: Tensor) -> Tensor:
        """What this rank adds to the sum. Rows that are rounded are so by the largest number on any rank."""
        largest = None
        if self.weight.rounds_rows and self.group.size > 1:
            own = x.abs().amax(1, keepdim=True).float()
            largest = self.group.all_gather(own).amax(1, keepdim=True)
        return self.weight.multiply(x, self.bias, largest)

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield self.weight.shard(f"{prefix}.{self.name}.weight", EVERY, self.columns)
        if self.bias is not None:
            yield Shard(f"{prefix}.{self.name}.bias", (EVERY,), self.bias)
