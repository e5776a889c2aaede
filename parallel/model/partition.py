"""Which layers of a decoder run side by side, and which rank holds them. Pure arithmetic, no tensors.

A partition is an ordered list of hyper-layers: consecutive layers whose attention blocks all read the hidden state in
front of the first of them. A hyper-layer of one layer is that layer. Source: EasySpec (arXiv 2502.02493, section 3);
the default is the rule behind the partitions published with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Partition = tuple[tuple[int, ...], ...]
MlpParallel = Literal["replicated", "tensor"]
Calibration = Literal["recompute", "owner", "broadcast"]


def default_partition(num_layers: int, group: int) -> Partition:
    """Hyper-layers of `group` layers; the first layer and the last are hyper-layers of one.

    Where the layers between them do not divide evenly, the outermost hyper-layers are shorter, the first one first:
    32 layers by 4 are 1 3 4 4 4 4 4 4 3 1, 28 by 3 are 1 2 3 3 3 3 3 3 3 3 1.
    """
    between = max(0, num_layers - 2)
    sizes = [group] * -(-between // group)
    inwards = [end for i in range(-(-len(sizes) // 2)) for end in {i: None, len(sizes) - 1 - i: None}]
    for i in range(len(sizes) * group - between):
        sizes[inwards[i % len(inwards)]] -= 1
    sizes = [1, *sizes, *[1] * (num_layers > 1)]
    return partition_of(sizes, num_layers)


def partition_of(given: Sequence[int] | Sequence[Sequence[int]], num_layers: int) -> Partition:
    """The partition given as sizes, `[1, 3, 4, 1]`, or as layers, `[[0], [1, 2], [3]]`; ValueError if it is neither."""
    sizes = [size for size in given if isinstance(size, int)]
    groups = [tuple(layers) for layers in given if not isinstance(layers, int)]
    if (sizes and groups) or not all(isinstance(layer, int) for layers in groups for layer in layers):
        raise ValueError("mixes sizes and layers; write all as sizes, [1,3,4,1], or all as layers, [[0],[1,2],[3]]")
    if sizes:
        groups = [tuple(range(stop - size, stop)) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    if not all(groups):
        raise ValueError("has an empty group; drop it")
    if [layer for group in groups for layer in group] != list(range(num_layers)):
        raise ValueError(f"must name the layers 0 to {num_layers - 1} once each and in order")
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """How `ranks` ranks share the layers of a decoder.

    mlp          replicated: every rank computes all of them; tensor: each is split over the ranks
    calibration  how an exact pass runs: every rank computes all layers (recompute), every rank computes its layers
                 (owner), or rank 0 computes all layers and broadcasts the KV rows (broadcast)
    """

    partition: Partition
    ranks: int
    mlp: MlpParallel = "replicated"
    calibration: Calibration = "recompute"

    def __post_init__(self) -> None:
        widest = max(map(len, self.partition))
        assert self.ranks == 1 or widest <= self.ranks, f"{widest} layers side by side on {self.ranks} ranks"
        assert self.mlp == "replicated" or self.calibration != "broadcast", (
            "with calibration=broadcast rank 0 needs whole MLPs"
        )

    @property
    def has_fuzzy(self) -> bool:
        """Whether any layers run side by side."""
        return any(len(group) > 1 for group in self.partition)

    def owner(self, layer: int) -> int:
        """The rank that runs this layer's attention in a hyper-layer: consecutive layers have different ones."""
        return layer % self.ranks

    def held(self, rank: int) -> tuple[int, ...]:
        """Layers whose attention weights and KV this rank needs."""
        if self.calibration == "recompute" or (self.calibration == "broadcast" and rank == 0):
            return tuple(layer for group in self.partition for layer in group)
        alone = self.calibration == "broadcast"  # single layers are run by all ranks rather than sent around
        return tuple(
            layer
            for group in self.partition
            for layer in group
            if self.owner(layer) == rank or (alone and len(group) == 1)
        )
