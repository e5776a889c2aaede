"""Bytes of a speculator on a rank, from its checkpoint's headers, before a tensor is read.

Upper bounds: a rank counts all tensors of the checkpoint, also those that it shares with others or does not read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from parallel.model.checkpoint import resolve_checkpoint, tensor_headers
from parallel.runtime.model_bytes import ITEM_BYTES, STORED_BYTES
from parallel.speculators.registry import read_speculator


@dataclass(frozen=True, slots=True)
class SpeculatorMemory:
    """What one rank holds of a speculator."""

    weight_bytes: int
    bytes_per_slot: int
    max_positions: int


def speculator_memory(path: str | Path, target_layers: int, ranks: int, dtype: str, weights: str) -> SpeculatorMemory:
    """The memory with numbers in `dtype` and matrices in `weights`; ValueError, one line, if no family knows the
    checkpoint."""
    config, directory = read_speculator(path, target_layers), resolve_checkpoint(str(path))
    per_slot = config.bytes_per_slot(ranks, ITEM_BYTES[dtype])
    sizes = (
        math.prod(shape) * (STORED_BYTES[weights] if len(shape) == 2 else ITEM_BYTES[dtype])
        for shape in tensor_headers(directory).values()
    )
    return SpeculatorMemory(sum(sizes), per_slot, config.max_positions)
