"""Loads a rank's parameters from a Hugging Face checkpoint: streamed, sliced, written in place.

One checkpoint tensor's slice is in memory at a time, so loading needs little more memory than the model itself. Knows
file formats, no layers.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from parallel.model.decoder import Decoder
from parallel.model.layers.linear import Shard

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*"]


def resolve_checkpoint(path: str) -> Path:
    """The directory `path`, or the hub's cache or a download if `path` is a hub id; ValueError if it is neither."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ValueError(f"{path}: is a file; name the checkpoint's directory")
    if not _HUB_ID.fullmatch(path):
        raise ValueError(f"{path}: no such directory")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's client raises types of its own, of requests, httpx and the OS
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path}: neither a directory nor available from the Hugging Face hub ({reason})") from None


@torch.inference_mode()
def load_weights(decoder: Decoder, path: str | Path) -> None:
    """Fill the decoder from `path`; ValueError naming tensor and file if the checkpoint does not fit."""
    directory = resolve_checkpoint(str(path))
    files = _tensor_files(directory)
    wanted: dict[Path, list[Shard]] = defaultdict(list)
    for shard in decoder.shards():
        if shard.name not in files:
            raise ValueError(f"{directory}: tensor {shard.name} is missing from the checkpoint")
        wanted[files[shard.name]].append(shard)
    for file, shards in wanted.items():
        _copy_shards(file, shards)
    decoder.silence_stretch()
    decoder.pack()


def _copy_shards(file: Path, shards: list[Shard]) -> None:
    with _open(file) as tensors:
        names = set(tensors.keys())
        for shard in shards:
            if shard.name not in names:
                raise ValueError(f"{file}: tensor {shard.name} is missing, though the index promises it")
            source = tensors.get_slice(shard.name)
            shape = tuple(source.get_shape())
            if shape != shard.shape:
                raise ValueError(f"{file}: tensor {shard.name} is {list(shape)}, config.json asks {list(shard.shape)}")
            shard.destination.copy_(source[shard.index])


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        try:
            names = json.loads(index.read_text())["weight_map"]
            return {name: directory / file for name, file in names.items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index}: not a safetensors index ({error!r})") from None
    if single.exists():
        with _open(single) as tensors:
            return dict.fromkeys(tensors.keys(), single)
    raise ValueError(f"{directory}: holds neither model.safetensors nor model.safetensors.index.json")


def _open(file: Path) -> safe_open:
    if not file.exists():
        raise ValueError(f"{file}: no such file, though the index names it")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}); fetch it again") from None
