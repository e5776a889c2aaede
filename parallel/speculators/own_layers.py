"""What all speculators with decoder layers of their own have in common: how these are made, split and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, Unpack

import torch

from parallel.comm.group import SINGLE, Group
from parallel.model.decoder import ServedLayers
from parallel.model.layers.rope import Rope
from parallel.model.layers.weight import Layer, TensorOptions
from parallel.speculators.config import LayersConfig
from parallel.speculators.place import SpeculatorPlace


class OwnLayers(Layer, ServedLayers):
    """The layers of one record, split over a group of ranks; weights are allocated uninitialised."""

    def __init__(self, config: LayersConfig, group: Group = SINGLE, **options: Unpack[TensorOptions]) -> None:
        block = config.block
        block.check_ranks(group.size)
        assert block.rope is not None, "draft layers have rotary positions"
        self.config = config
        self.group = group
        self.device = torch.device(options["device"])
        self.rope = Rope(block.rope, block.head_dim, options["dtype"], options["device"])

    @classmethod
    def opened(cls, directory: Path, config: Any, place: SpeculatorPlace, **given: Any) -> Self:
        """Those of a checkpoint, beside their target. ValueError, one line, if it does not fit its own config.json."""
        layers = cls(config, place.group, **given, **place.options)
        place.load(layers, config.tensor_shapes(), directory)
        return layers
