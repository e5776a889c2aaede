"""The bias of attention scores by the distance of key and query, as T5 has it (arXiv 1910.10683, section 2.1).

All blocks of a stack share one table. Knows no attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from parallel.comm.group import Group
from parallel.model.config import RelativeBias
from parallel.model.layers.linear import even_rows
from parallel.model.layers.weight import EVERY, Layer, Shard, TensorOptions


class ScoreBias(Layer):
    """This rank's heads of the table [buckets, heads]."""

    def __init__(
        self, config: RelativeBias, name: str, num_heads: int, group: Group, **options: Unpack[TensorOptions]
    ) -> None:
        self._config = config
        self._name = name
        self._heads = even_rows(num_heads, group)
        self.table = torch.empty(config.num_buckets, num_heads // group.size, **options)

    def of(self, distances: Tensor) -> Tensor:
        """Key positions minus query positions, int64 [T, L] -> what is added to the scores, [heads, T, L]."""
        return self.table[buckets(distances, self._config)].permute(2, 0, 1)

    def by_distance(self) -> tuple[Tensor, Tensor]:
        """The table, and the bucket of each distance back, int64; the last one is that of all beyond."""
        return self.table, buckets(-torch.arange(self._config.max_distance + 1), self._config)

    def shards(self) -> Iterator[Shard]:
        yield Shard(f"{self._name}.weight", (EVERY, self._heads), self.table)


def buckets(distances: Tensor, config: RelativeBias) -> Tensor:
    """The bucket of every distance. Half of those of a direction are of one distance each; the others grow with the
    logarithm, and what is further than `max_distance` is in the last one."""
    count, first = config.num_buckets, torch.zeros_like(distances)
    if config.both_ways:
        count //= 2
        first = (distances > 0).long() * count
        away = distances.abs()
    else:
        away = (-distances).clamp(min=0)
    exact = count // 2
    growth = torch.log(away.clamp(min=1).float() / exact) / math.log(config.max_distance / exact)
    shared = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
    return first + torch.where(away < exact, away, shared)
