"""The record of Chimera's layer, and the layout of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.model.checkpoint import Shape, block_tensors
from parallel.model.families.fields import HfConfig
from parallel.model.families.registry import read_config
from parallel.speculators.config import FINAL, LayersConfig, beside
from parallel.speculators.layout import CheckpointLayout, opened_by

TRIGRAM = 3
"""Tokens whose embeddings make a row; the first token stands for those before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChimeraConfig(LayersConfig):
    def bytes_per_slot(self, ranks: int, item_bytes: int) -> int:
        return super(ChimeraConfig, self).bytes_per_slot(ranks, item_bytes) + 8  # and its token

    def tensor_shapes(self) -> dict[str, Shape]:
        hidden = self.block.hidden_size
        wide = TRIGRAM * hidden
        shapes: dict[str, Shape] = {
            "mix.weight": (wide, wide),
            "mix.bias": (wide,),
            "narrow.weight": (hidden, wide),
            "norm.weight": (hidden,),
            "join.weight": (hidden, 2 * hidden),
        }
        return shapes | {f"layer.{name}": shape for name, shape, _ in block_tensors(self.block)}


def read_own(hf: HfConfig) -> ChimeraConfig:
    """The record of a checkpoint that `job=train job.recipe=chimera` made."""
    block = read_config(hf)
    return ChimeraConfig(method="chimera", **beside(block), taps=(FINAL,), block=block)


OWN = CheckpointLayout(read_own, opened_by("chimera.runner"))
