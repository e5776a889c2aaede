"""Where a speculator runs, as the families that open one need it. Knows no family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from parallel.comm.group import Group
from parallel.kv.pool import KVPool
from parallel.kv.row_limits import RowLimits
from parallel.model.checkpoint import Shape
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder, ServedLayers, pack_weights
from parallel.model.layers.attention import AttentionShape
from parallel.model.layers.weight import Stored, TensorOptions, Weight
from parallel.model.weights import load_shards
from parallel.runtime.decoder_runner import DecoderRunner


@dataclass(frozen=True, slots=True)
class SpeculatorPlace:
    """Place in which a speculator runs."""

    tables: Decoder
    """The target's embedding and head."""
    group: Group
    device: torch.device | str
    dtype: torch.dtype
    num_slots: int
    """KV rows."""
    weights: Stored | None = None
    """Type in which matrices are stored; None: `dtype`."""
    target_layers: int = 0
    """0 if that is not known."""
    target: DecoderRunner | None = None
    """The target itself, on whose layers a `SelfDraftRunner` can draft; None where the speculator has ranks of its
    own."""
    reads_fused: bool = False
    """The target's features come fused (`SpeculatorConfig.fuser`)."""
    slots_of_windows: Callable[[RowLimits], int] | None = None
    """KV rows that are enough where every sequence keeps a window of them."""

    @property
    def options(self) -> TensorOptions:
        return TensorOptions(dtype=self.dtype, device=self.device)

    def keeping(self, limits: RowLimits) -> SpeculatorPlace:
        """The place with room for so many rows of every sequence."""
        slots = self.num_slots if self.slots_of_windows is None else self.slots_of_windows(limits)
        return replace(self, num_slots=min(self.num_slots, slots))

    def its_target(self, directory: Path, method: str) -> DecoderRunner:
        """The target; ValueError, one line, if it is not there."""
        if self.target is None:
            remedy = "use pipeline=sync with drafter.placement=attached"
            raise ValueError(f"{directory}: {method} drafts with the target's own layers, on its ranks; {remedy}")
        return self.target

    def make_pool(self, layers: DecoderConfig, num_layers: int | None = None) -> tuple[KVPool, AttentionShape]:
        """KV rows for layers of this shape, or so many of them, and how their heads read them."""
        count = layers.num_layers if num_layers is None else num_layers
        kv_heads = layers.local_kv_heads(self.group.size)
        pool = KVPool(count, self.num_slots, kv_heads, layers.head_dim, self.dtype, self.device)
        return pool, AttentionShape.of(layers, self.group.size)

    def load(self, layers: ServedLayers, shapes: Mapping[str, Shape], directory: Path) -> None:
        fill(layers, shapes, directory, None if self.weights == self.dtype else self.weights)


def fill(layers: ServedLayers, shapes: Mapping[str, Shape], directory: Path, stored: Stored | None = None) -> None:
    """Fill layers from a checkpoint and keep their matrices as `stored`; ValueError naming tensor and file if it does
    not fit."""
    if stored is not None:
        for part in layers.walk():
            if isinstance(part, Weight):
                part.store_as(stored)
    load_shards(layers.shards(), shapes, directory)
    pack_weights(layers)
