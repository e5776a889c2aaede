"""The record of Chimera's layer, and the layout of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallel.model.checkpoint import Shape, block_tensors
from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig
from parallel.model.families.registry import read_config
from parallel.runtime.model_bytes import kv_bytes_per_slot
from parallel.speculators.config import FINAL, SpeculatorConfig, beside
from parallel.speculators.layout import CheckpointLayout

if TYPE_CHECKING:
    from parallel.speculators.chimera.runner import ChimeraRunner
    from parallel.speculators.place import SpeculatorPlace

TRIGRAM = 3
"""Tokens whose embeddings make a row; the first token stands for those before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChimeraConfig(SpeculatorConfig):
    block: DecoderConfig
    """The shape of the layer."""

    def bytes_per_slot(self, ranks: int, item_bytes: int) -> int:
        return kv_bytes_per_slot(self.block, ranks, item_bytes) + 8  # and its token

    def tensor_shapes(self) -> dict[str, Shape]:
        """Every tensor of the checkpoint."""
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
    return ChimeraConfig(
        method="chimera",
        **beside(block),
        taps=(FINAL,),
        block=block,
    )


def open_chimera(directory: Path, config: ChimeraConfig, place: SpeculatorPlace) -> ChimeraRunner:
    """Load the layer beside its target; what runs it is loaded here alone."""
    from parallel.speculators.chimera.runner import ChimeraLayers, ChimeraRunner

    layers = ChimeraLayers(config, place.group, **place.options)
    place.load(layers, config.tensor_shapes(), directory)
    return ChimeraRunner(config, layers, place)


OWN = CheckpointLayout(read_own, open_chimera)
