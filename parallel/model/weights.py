"""Loads a rank's parameters from a Hugging Face checkpoint: streamed, sliced, written in place.

One checkpoint tensor's slice is in memory at a time, so loading needs little more memory than the model itself. Knows
shards, no layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from parallel.model.checkpoint import Shape, find_tensors, resolve_checkpoint, tensor_shapes
from parallel.model.decoder import Decoder
from parallel.model.layers.weight import Shard


@torch.inference_mode()
def load_weights(decoder: Decoder, path: str | Path) -> None:
    """Fill the decoder from `path`; ValueError naming tensor and file if the checkpoint does not fit."""
    load_shards(decoder.shards(), tensor_shapes(decoder.config), resolve_checkpoint(str(path)))
    decoder.silence_stretch()
    decoder.pack()


@torch.inference_mode()
def load_shards(shards: Iterable[Shard], shapes: Mapping[str, Shape], directory: Path) -> None:
    """Copy parts of a checkpoint's tensors, whose whole shapes must be `shapes`, to their places."""
    shards = list(shards)
    files = find_tensors(directory, {shard.name: shapes[shard.name] for shard in shards})
    for file in dict.fromkeys(files.values()):
        with safe_open(file, framework="pt") as tensors:
            for shard in [one for one in shards if files[one.name] == file]:
                part = tensors.get_slice(shard.name)[shard.index]
                shard.destination.copy_(part if shard.picked is None else part[list(shard.picked)])
                _check_finite(shard, file)


def _check_finite(shard: Shard, file: Path) -> None:
    """ValueError if a number is NaN or infinite: every token would be made of it."""
    weights = shard.destination
    if weights.numel() and not all(map(math.isfinite, torch.stack(weights.aminmax()).tolist())):
        remedy = "fetch the file again, or choose another dtype"
        raise ValueError(f"{file}: tensor {shard.name} holds NaN or infinity in {weights.dtype}; {remedy}")
