"""A Hugging Face checkpoint on disk: the tensors that a decoder needs, and the files that hold them.

Reads the headers of the files (`tensor_files.py`) and no tensor, so that a damaged checkpoint is refused before a
process is started for it. Loads no PyTorch for safetensors; knows no ranks and no layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypedDict

from safetensors import SafetensorError

from parallel.model.config import DecoderConfig
from parallel.model.config_fields import read_config_file
from parallel.model.quantization import Quantization, Shape, read_quantization
from parallel.model.tensor_files import PICKLED, open_tensors
from parallel.ranges import errors_of
from parallel.typed_json import as_type, read_json

Split = Literal["heads", "kv_heads", "mlp", "whole"]
"""What tensor-parallel ranks divide a tensor by."""


_Header = tuple[Shape, str]
"""Shape and type of a tensor, the latter by safetensors' name of it."""


class _Index(TypedDict):
    weight_map: dict[str, str]


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*"]
_PICKLED_FILES = ["pytorch_model*.bin", *(name for name in PICKLED if name.endswith((".pt", ".pth")))]


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
        directory = Path(huggingface_hub.snapshot_download(path, allow_patterns=_HUB_FILES))
        if any(directory.glob("*.safetensors")):
            return directory
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=[*_HUB_FILES, *_PICKLED_FILES]))
    except Exception as error:  # the hub's client raises types of its own, of requests, httpx and the OS
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path}: neither a directory nor available from the Hugging Face hub ({reason})") from None


def checkpoint_name(directory: Path) -> str:
    """The hub id of a directory in the hub's cache, whose own name is that of a commit; else the directory's name."""
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return directory.name


# --- the tensors that a decoder needs ---------------------------------------------------------------------------------


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every tensor that the whole decoder reads from its checkpoint."""
    table = config.vocab_size, config.hidden_size
    shapes: dict[str, Shape] = {f"{config.names.embedding}.weight": table}
    if not config.tied:
        shapes[f"{config.names.head}.weight"] = table
    for stack in (config, *([] if config.encoder is None else [config.encoder])):
        shapes |= dict(end_tensors(stack))
        for i in range(stack.num_layers - stack.stretch):
            shapes |= {f"{stack.block_name(i)}.{name}": shape for name, shape, _ in block_tensors(stack.of_layer(i))}
    return shapes


def end_tensors(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    """The norms before and after all blocks, the table of learned positions and the bias of the head, where there are
    any."""
    if config.final_norm:
        yield from ((name, shape) for name, shape, _ in _norm(config, config.names.final_norm))
    if config.embedding_norm:
        yield from ((name, shape) for name, shape, _ in _norm(config, config.names.embedding_norm))
    if config.head_bias:
        yield config.names.head_bias, (1, config.vocab_size)
    if config.relative_bias is not None:
        yield f"{config.names.relative_bias}.weight", (config.relative_bias.num_buckets, config.num_heads)
    if config.rope is None and config.positions == "learned":
        yield f"{config.names.positions}.weight", (config.max_positions + config.position_offset, config.hidden_size)


def block_tensors(config: DecoderConfig) -> Iterator[tuple[str, Shape, Split]]:
    """The tensors of one block, by their names within it; of a decoder whose layers differ, one `of_layer`."""
    names, hidden, inner = config.names, config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for own in (names, replace(names, attention=names.cross)) if config.encoder is not None else (names,):
        for kind, name in zip("qkv", names.projections, strict=True):
            rows, split = (queries, "heads") if kind == "q" else (keys, "kv_heads")
            yield from _linear(own.in_attention(name), (rows, hidden), split, split if config.qkv_bias else None)
        yield from _linear(own.in_attention(names.o), (hidden, queries), "heads", "whole" if config.o_bias else None)
    if config.encoder is not None:
        yield from _norm(config, names.cross_norm)
    for name in "qk" if config.qk_norm else "":
        yield names.in_attention(f"{name}_norm.weight"), (config.head_dim,), "whole"
    for name in config.norm_names:
        yield from _norm(config, name)
    if config.num_experts:
        yield f"{names.router}.weight", (config.num_experts, hidden), "whole"
    sizes = {f"{names.experts}.{i}.": inner for i in range(config.num_experts)} or {"": inner}
    if config.shared_size:
        yield f"{names.shared_gate}.weight", (1, hidden), "whole"
        sizes[f"{names.shared}."] = config.shared_size
    for prefix, size in sizes.items():
        for name in (names.gate, names.up) if config.gated else (names.up,):
            yield from _linear(prefix + name, (size, hidden), "mlp", "mlp" if config.mlp_bias else None)
        yield from _linear(prefix + names.down, (hidden, size), "mlp", "whole" if config.mlp_bias else None)


def _linear(name: str, shape: Shape, split: Split, bias: Split | None) -> Iterator[tuple[str, Shape, Split]]:
    yield f"{name}.weight", shape, split
    if bias is not None:
        yield f"{name}.bias", shape[:1], bias


def _norm(config: DecoderConfig, name: str) -> Iterator[tuple[str, Shape, Split]]:
    for kind in ("weight", "bias") if config.norm == "layer" else ("weight",):
        yield f"{name}.{kind}", (config.hidden_size,), "whole"


# --- the files that hold them -----------------------------------------------------------------------------------------


def find_tensors(directory: Path, wanted: Mapping[str, Shape]) -> dict[str, Path]:
    """Tensor -> the file that holds it whole, for all tensors in which those `wanted` are stored; ValueError, one line,
    for the first that is missing or does not fit."""
    files, headers, found = _files(directory), dict[Path, dict[str, _Header]](), dict[str, Path]()
    for stored in stored_tensors(directory, wanted).values():
        for name, shapes in stored.items():
            if name not in files:
                raise ValueError(f"{directory}: tensor {name} is missing from the checkpoint; fetch it again")
            file = found[name] = files[name]
            if file not in headers:
                headers[file] = _read_header(file)
            header = headers[file].get(name)
            if header is None:
                raise ValueError(
                    f"{file}: tensor {name} is missing, though the index promises it; fetch the file again"
                )
            shape, kind = header
            if shape not in shapes:
                raise ValueError(f"{file}: tensor {name} is {list(shape)}, config.json asks {list(shapes[-1])}")
            if len(stored) == 1 and name.endswith((".weight", ".bias")) and not kind.upper().startswith(("F", "BF")):
                raise ValueError(f"{file}: tensor {name} is of type {kind}, no floating-point one; fetch it again")
    return found


def stored_tensors(directory: Path, wanted: Mapping[str, Shape]) -> dict[str, dict[str, tuple[Shape, ...]]]:
    """Tensor -> the tensors in which the checkpoint stores it, itself unless it is quantised, and their shapes."""
    quantization, available = quantization_of(directory), _files(directory)
    if quantization is None:
        return {name: {name: (shape,)} for name, shape in wanted.items()}
    return {name: quantization.tensors(name, shape, available) for name, shape in wanted.items()}


def quantization_of(directory: Path) -> Quantization | None:
    """How the checkpoint's matrices are quantised; None for plain numbers and for a directory without config.json."""
    return read_quantization(read_config_file(directory)) if (directory / "config.json").exists() else None


def quantized_layers(directory: Path, config: DecoderConfig) -> Counter[str]:
    """Matrix of a block, by its name within it -> the layers that have it quantised in the checkpoint."""
    found = Counter[str]()
    for i in range(config.num_layers):
        shapes = {name: shape for name, shape, _ in block_tensors(config.of_layer(i)) if len(shape) == 2}
        prefix = f"{config.block_name(i)}."
        stored = stored_tensors(directory, {prefix + name: shape for name, shape in shapes.items()})
        found.update(name.removeprefix(prefix) for name, parts in stored.items() if len(parts) > 1)
    return found


def tensor_headers(directory: Path) -> dict[str, Shape]:
    """Every tensor of the checkpoint and its shape."""
    return {name: shape for name, (shape, _) in _headers(directory).items()}


def tensor_types(directory: Path, wanted: Mapping[str, Shape]) -> dict[str, str]:
    """Tensor -> the type of its numbers, by safetensors' name of it, for all in which those `wanted` are stored."""
    found = find_tensors(directory, wanted)
    headers = {file: _read_header(file) for file in set(found.values())}
    return {name: headers[file][name][1] for name, file in found.items()}


def stores_bfloat16(directory: Path, config: DecoderConfig) -> bool:
    """Whether all matrices are bfloat16: kept so, they are the numbers that they would be in float32."""
    if quantization_of(directory) is not None:
        return False
    wanted = {name: shape for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    return all(kind == "BF16" for kind in tensor_types(directory, wanted).values())


def holds_bfloat16(directory: Path) -> bool:
    """Whether all matrices of a checkpoint of any layout are bfloat16."""
    return all(kind == "BF16" for shape, kind in _headers(directory).values() if len(shape) == 2)


def _files(directory: Path) -> Mapping[str, Path]:
    """Tensor -> the file that should hold it. Pickled files are read where there are no others."""
    plain = sorted(directory.glob("*.safetensors"))
    pickled = [directory / name for name in PICKLED if (directory / name).exists()]
    single = directory / "model.safetensors"
    for name, is_used in (("model.safetensors", True), ("pytorch_model.bin", not plain)):
        if is_used and (index := directory / f"{name}.index.json").exists():
            return _indexed(index)
    if single in plain or len(plain) == 1:
        plain = [single if single in plain else plain[0]]
    elif plain or not pickled:
        raise ValueError(f"{directory}: holds neither model.safetensors nor model.safetensors.index.json; fetch them")
    return {name: file for file in plain or pickled for name in _read_header(file)}


def _indexed(index: Path) -> dict[str, Path]:
    with errors_of(str(index), "fetch it again"):
        names = as_type(read_json(index), _Index)["weight_map"]
    return {name: index.parent / file for name, file in names.items()}


def _read_header(file: Path) -> dict[str, _Header]:
    """Name, shape and type of every tensor in the file, whose length is compared with its header."""
    if not file.exists():
        raise ValueError(f"{file}: no such file, though the index names it; fetch it")
    try:
        with open_tensors(file, "np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}); fetch it again") from None


def _headers(directory: Path) -> dict[str, _Header]:
    """Name, shape and type of every tensor in the files of a checkpoint."""
    files = set(_files(directory).values())
    return {name: header for file in files for name, header in _read_header(file).items()}
