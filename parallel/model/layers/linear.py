"""Linear layers whose weight is sharded over a group of ranks.

A column layer gives every rank some outputs, a row layer takes some inputs from every rank and sums; a column layer
followed by a row layer needs one all-reduce (Megatron-LM, arXiv 1909.08053, section 3). Knows no models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from parallel.comm.group import Group
from parallel.model.layers.weight import Layer, TensorOptions, Weight


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a checkpoint tensor that this rank holds: `tensor[index]` is copied to `destination`."""

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    destination: Tensor


@dataclass(frozen=True, slots=True)
class OutputShare:
    """One of the fused outputs of a column layer: this rank has `rows` of its `size` outputs."""

    name: str
    size: int
    rows: slice


def even_rows(size: int, group: Group) -> slice:
    """This rank's contiguous share of `size` outputs or inputs, which the group's size divides."""
    assert size % group.size == 0, f"{size} cannot be split over {group.size} ranks"
    share = size // group.size
    return slice(group.rank * share, (group.rank + 1) * share)


class ColumnLinear(Layer):
    """[T, inputs] -> [T, this rank's outputs of all parts, fused]."""

    def __init__(self, inputs: int, parts: list[OutputShare], *, bias: bool, **options: Unpack[TensorOptions]) -> None:
        self.inputs = inputs
        self.parts = parts
        outputs = sum(part.rows.stop - part.rows.start for part in parts)
        self.weight = Weight(outputs, inputs, **options)
        self.bias = torch.empty(outputs, **options) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.multiply(x, self.bias)

    def shards(self, prefix: str) -> Iterator[Shard]:
        start = 0
        for part in self.parts:
            stop = start + part.rows.stop - part.rows.start
            name = f"{prefix}.{part.name}"
            index = (part.rows, slice(0, self.inputs))
            yield Shard(f"{name}.weight", (part.size, self.inputs), index, self.weight.plain[start:stop])
            if self.bias is not None:
                yield Shard(f"{name}.bias", (part.size,), (part.rows,), self.bias[start:stop])
            start = stop


class RowLinear(Layer):
    """[T, this rank's inputs] -> [T, outputs], summed over the group."""

    def __init__(
        self, name: str, inputs: int, outputs: int, group: Group, *, bias: bool, **options: Unpack[TensorOptions]
    ) -> None:
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.group = group
        self.columns = even_rows(inputs, group)
        self.weight = Weight(outputs, inputs // group.size, **options)
        # only rank 0 holds the bias, so that the sum over the ranks has it once
        self.bias = torch.empty(outputs, **options) if bias and group.rank == 0 else None

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.weight.multiply(x, self.bias))

    def shards(self, prefix: str) -> Iterator[Shard]:
        index = (slice(0, self.outputs), self.columns)
        yield Shard(f"{prefix}.{self.name}.weight", (self.outputs, self.inputs), index, self.weight.plain)
        if self.bias is not None:
            whole = (slice(0, self.outputs),)
            yield Shard(f"{prefix}.{self.name}.bias", (self.outputs,), whole, self.bias)
