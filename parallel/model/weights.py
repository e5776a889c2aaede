"""Loads a rank's parameters from a Hugging Face checkpoint: streamed, sliced, written in place.

One checkpoint tensor's slice is in memory at a time, so loading needs little more memory than the model itself. Knows
shards, no layers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parallel.model.checkpoint import (
    find_tensors,
    quantization_of,
    resolve_checkpoint,
    stored_tensors,
    tensor_headers,
    tensor_shapes,
)
from parallel.model.decoder import Decoder
from parallel.model.families.registry import read_config
from parallel.model.layers.weight import OpenRows, QuantizedRows, Shard, Weight
from parallel.model.quantization import Shape
from parallel.model.tensor_files import open_tensors

if TYPE_CHECKING:
    from parallel.kernels.packed_products import Codes, PackedRows
    from parallel.model.dequantize import MatrixPart

_CUDA_THREADS = 4
"""That read for one GPU: its bus takes more than one thread copies from the system's cache. Not measured."""


@torch.inference_mode()
def load_weights(decoder: Decoder, path: str | Path) -> None:
    """Fill the decoder from `path`; ValueError naming tensor and file if the checkpoint does not fit."""
    _load_parts(decoder, path, [decoder.shards()])
    decoder.silence_stretch()
    decoder.pack()


@torch.inference_mode()
def check_weights(decoder: Decoder, path: str | Path) -> None:
    """ValueError, one line, unless `reload_weights` can fill a loaded decoder from `path`: a checkpoint of the same
    shape, with every number finite in the type in which it is kept. Changes nothing."""
    directory, config = resolve_checkpoint(str(path)), decoder.config
    if any(isinstance(part, Weight) and part.holds_codes for part in decoder.walk()):
        raise ValueError(f"{path}: a checkpoint's codes are not replaced; start with target.weights=bfloat16")
    if replace(read_config(directory).stretched(config.stretch), head=config.head) != config:
        raise ValueError(f"{directory}: config.json describes another model than the one that is served")
    shards = list(decoder.shards())
    checkpoint = _StoredTensors(directory, shards, tensor_shapes(config))
    with ExitStack() as stack:
        get = checkpoint.opened(stack)
        for shard in shards:
            kept = shard.place().dtype
            numbers = checkpoint.numbers(shard, get).to(kept if kept.is_floating_point else torch.float32)
            _check_finite(numbers, shard.name, checkpoint.file_of(shard))


@torch.inference_mode()
def reload_weights(decoder: Decoder, path: str | Path) -> None:
    """Fill a loaded decoder again, in place, from a checkpoint that `check_weights` has accepted: captured passes, and
    others that share its layers, read the new numbers."""
    _load_parts(decoder, path, decoder.reopened_shards())


def _load_parts(decoder: Decoder, path: str | Path, parts: Iterable[Iterable[Shard]]) -> None:
    on_cuda = decoder.device.type == "cuda"
    shapes, directory = tensor_shapes(decoder.config), resolve_checkpoint(str(path))
    with torch.cuda.device(decoder.device) if on_cuda else nullcontext():
        for shards in parts:
            load_shards(shards, shapes, directory, _CUDA_THREADS if on_cuda else 1)


def read_kv_scales(decoder: Decoder, path: str | Path) -> list[tuple[float, float]]:
    """What keys and values of each layer of this rank are divided by in FP8, as compressed-tensors' `kv_cache_scheme`
    stores it; 1 where the checkpoint has none. ValueError naming a tensor that is no such number."""
    directory, config = resolve_checkpoint(str(path)), decoder.config
    headers, found = tensor_headers(directory), dict[str, float]()
    scales = [config.names.in_attention(f"{kind}_scale") for kind in "kv"]
    names = [[f"{config.block_name(layer)}.{scale}" for scale in scales] for layer in decoder.held]
    wanted = {name: headers[name] for pair in names for name in pair if name in headers}
    for name, file in find_tensors(directory, wanted).items():
        with open_tensors(file) as tensors:
            scale = tensors.get_tensor(name)
        if scale.numel() != 1 or not 0 < scale.item() < math.inf:
            remedy = "use kv_dtype=auto, or a checkpoint with one positive scale for each tensor"
            raise ValueError(
                f"{file}: tensor {name} of shape {list(scale.shape)} is no scale of keys or values; {remedy}"
            )
        found[name] = float(scale.item())
    return [(found.get(key, 1.0), found.get(value, 1.0)) for key, value in names]


def load_shards(shards: Iterable[Shard], shapes: Mapping[str, Shape], directory: Path, num_threads: int = 1) -> None:
    """Copy parts of a checkpoint's tensors, whose whole shapes must be `shapes`, to their places; quantised ones as the
    numbers that they stand for. Each thread reads files of its own turn, and has one tensor in memory at a time."""
    shards = list(shards)
    checkpoint = _StoredTensors(directory, shards, shapes)
    order = {file: i for i, file in enumerate(dict.fromkeys(checkpoint.files.values()))}
    shards.sort(key=lambda one: order[checkpoint.file_of(one)])
    with ExitStack() as stack:
        shards = _settled(shards, checkpoint, checkpoint.opened(stack))
    device = torch.cuda.current_device() if num_threads > 1 and torch.cuda.is_available() else None

    @torch.inference_mode()
    def load(own: Sequence[Shard]) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # of this thread: pinned memory belongs to a device's context
        with ExitStack() as stack:
            get = checkpoint.opened(stack)
            for shard in own:
                checkpoint.fill(shard, get, pins=device is not None)
                _check_finite(shard.place(), shard.name, checkpoint.file_of(shard))

    if num_threads == 1:
        load(shards)
        return
    with ThreadPoolExecutor(num_threads, "load") as pool:
        for part in [pool.submit(load, shards[first::num_threads]) for first in range(num_threads)]:
            part.result()


class _StoredTensors:
    """What a checkpoint stores of the tensors that some shards are parts of: a quantised one is several. `shapes` are
    those of whole tensors, and `files` hold them. What is read comes from `get`, of files that are `opened`."""

    def __init__(self, directory: Path, shards: Iterable[Shard], shapes: Mapping[str, Shape]) -> None:
        self.quantization = quantization_of(directory)
        self._shapes = {shard.name: shapes[shard.name] for shard in shards}
        self._stored = stored_tensors(directory, self._shapes)
        self.files = find_tensors(directory, self._shapes)

    def opened(self, stack: ExitStack) -> Callable[[str], Any]:
        """The tensors, to be indexed, until the stack is closed; each file is opened once."""
        files: dict[Path, Any] = {}

        def get(name: str) -> Any:
            file = self.files[name]
            if file not in files:
                files[file] = stack.enter_context(open_tensors(file))
            return files[file].get_slice(name)

        return get

    def file_of(self, shard: Shard) -> Path:
        return self.files[next(iter(self._stored[shard.name]))]

    def is_coded(self, shard: Shard) -> bool:
        """Whether its tensor is quantised."""
        return len(self._stored[shard.name]) > 1

    def matrix(self, shard: Shard) -> MatrixPart:
        """Its part of a quantised tensor."""
        from parallel.model.dequantize import MatrixPart  # for quantised tensors alone

        return MatrixPart(shard.name, self._stored[shard.name], self._shapes[shard.name], shard.index[1])

    def fill(self, shard: Shard, get: Callable[[str], Any], *, pins: bool) -> None:
        """Copy the part to its place, from pinned memory: from pageable a copy to a GPU runs at a fraction of the
        bus."""
        place: Any = shard.place()
        if shard.takes_codes:
            place.copy_(self._codes(shard, get))
            return
        part = self.numbers(shard, get)
        place.copy_(part.pin_memory() if pins else part)

    def numbers(self, shard: Shard, get: Callable[[str], Any]) -> Tensor:
        """The part of the tensor, as numbers."""
        part = self._codes(shard, get).numbers() if self.is_coded(shard) else get(shard.name)[shard.index]
        return part if shard.picked is None else part[list(shard.picked)]

    def _codes(self, shard: Shard, get: Callable[[str], Any]) -> Codes:
        from parallel.model.dequantize import read_codes

        assert self.is_coded(shard), "codes come from a quantised tensor"
        assert self.quantization is not None, "only quantised tensors are stored in several"
        return read_codes(self.quantization, self.matrix(shard), shard.index[0], get)


def _settled(shards: Sequence[Shard], checkpoint: _StoredTensors, get: Callable[[str], Any]) -> list[Shard]:
    """The shards, with room for weights that are kept as the checkpoint has them: as codes if a kernel multiplies by
    all that are fused in one, else as numbers."""
    together: dict[Weight, list[Shard]] = {}
    for shard in shards:
        if isinstance(shard.destination, OpenRows):
            together.setdefault(shard.destination.weight, []).append(shard)
    num_unpacked = 0
    for weight, own in together.items():
        found = None
        if checkpoint.quantization is not None and all(map(checkpoint.is_coded, own)):
            from parallel.model.dequantize import packing_on

            found = packing_on(weight.plain.device, checkpoint.quantization, [*map(checkpoint.matrix, own)], get)
            num_unpacked += found is None
        weight.settle(*found) if found else weight.settle(None)
    if num_unpacked:
        why = "inputs in an order of their own, groups of less than 16 inputs, or FP8 below compute capability 8.9"
        facts = {"dequantised": num_unpacked, "of": len(together), "why": why}
        logging.getLogger("specdec.weights").warning("weights-not-packed", extra={"facts": facts})
    return [
        shard.destination.weight.settled(shard) if isinstance(shard.destination, OpenRows) else shard
        for shard in shards
    ]


def _check_finite(weights: Tensor | QuantizedRows | PackedRows, name: str, file: Path) -> None:
    """ValueError if a number is NaN or infinite: every token would be made of it."""
    if weights.numel() and not all(map(math.isfinite, torch.stack(weights.aminmax()).tolist())):
        remedy = "fetch the file again, or choose another dtype"
        raise ValueError(f"{file}: tensor {name} holds NaN or infinity in {weights.dtype}; {remedy}")
