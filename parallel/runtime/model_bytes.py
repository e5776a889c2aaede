"""Bytes of a model on a rank, from its shapes alone: before a weight is read.

Loads no PyTorch, so that a process that only starts ranks need not either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from parallel.model.checkpoint import (
    block_tensors,
    end_tensors,
    quantization_of,
    quantized_layers,
    resolve_checkpoint,
    stores_bfloat16,
)
from parallel.model.config import DecoderConfig
from parallel.model.families.registry import read_config
from parallel.model.partition import LayerLayout
from parallel.model.quantization import Quantization

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INT8 = ("int8", "w8a8")
"""Ways to store a matrix as int8; for the second rows are rounded to int8 too."""
STORED_BYTES = {**ITEM_BYTES, **dict.fromkeys(INT8, 1)}
SCALE_BYTES = 4
"""Scale of one output of an int8 matrix."""
COLUMN_BYTES = 8
"""Place of the logit of one row, where a head has only some."""


def dtype_name(name: str, device: str) -> str:
    """`auto` is bfloat16 on a GPU and float32, in which tokens can be compared exactly, on a CPU."""
    if name == "auto":
        return "bfloat16" if device.startswith("cuda") else "float32"
    if name not in ITEM_BYTES:
        raise ValueError(f"dtype={name}: unknown; use auto, {', '.join(ITEM_BYTES)}")
    return name


def weights_name(
    weights: str, dtype: str, device: str, path: str = "", *, has_kernels: bool = True, rounds: bool = False
) -> str:
    """The type in which matrices are stored beside numbers of type `dtype`. `auto` is the same, but "packed" on a GPU
    if the checkpoint at `path` is quantised, and bfloat16 if it is, which on a CPU with kernels is read faster and
    rounds nothing; int8 there if it `rounds`, as of a drafter, whose bytes are half of its time. `has_kernels`: whether
    the device has those for the matrices."""
    on_cuda, directory = device.startswith("cuda"), resolve_checkpoint(path) if path else None
    is_quantized = directory is not None and quantization_of(directory) is not None
    if weights == "packed":
        if not is_quantized:
            raise ValueError("weights=packed: the checkpoint is not quantised; drop weights=packed")
        if not has_kernels:
            raise ValueError("weights=packed: needs a CUDA device, Triton and a C compiler; drop weights=packed")
        return weights
    if weights == "auto":
        if directory is None or not has_kernels:
            return dtype
        if on_cuda:
            return "packed" if is_quantized else dtype
        keeps = device == "cpu" and dtype == "float32" and stores_bfloat16(directory, read_config(directory))
        return ("int8" if rounds else "bfloat16") if keeps else dtype
    dtypes = ("float32", "bfloat16") if weights == "w8a8" else ("float32", weights)
    if dtype not in dtypes or (on_cuda and weights != dtype):
        needed = "float32 or bfloat16" if weights == "w8a8" else "float32"
        raise ValueError(
            f"weights={weights}: needs a CPU and dtype={needed}; write device=cpu or drop weights={weights}"
        )
    return weights


def kv_item_bytes(kv_dtype: str, dtype: str) -> int:
    """Bytes of one number in a KV row, by `target.kv_dtype` and the model's type."""
    return 1 if kv_dtype == "fp8" else ITEM_BYTES[dtype]


def model_memory(
    config: DecoderConfig,
    path: str,
    ranks: int,
    device: str,
    types: tuple[str, str, str],
    *,
    rounds: bool = False,
) -> tuple[int, int]:
    """Bytes of the weights on one of the ranks that share the tensors of the checkpoint at `path`, and of a KV slot
    there. `types` are the options `dtype`, `weights` and `kv_dtype`; `rounds` as for `weights_name`."""
    dtype, kv_dtype = dtype_name(types[0], device), types[2]
    stored = weights_name(types[1], dtype, device, path, rounds=rounds)
    held = weight_bytes(config, ranks, ITEM_BYTES[dtype], weights=stored, path=path)
    return held, kv_bytes_per_slot(config, ranks, kv_item_bytes(kv_dtype, dtype))


def weight_bytes(
    config: DecoderConfig,
    ranks: int,
    item_bytes: int,
    layout: LayerLayout | None = None,
    rank: int = 0,
    *,
    weights: str | None = None,
    path: str = "",
) -> int:
    """The weights of one of the `ranks` that share the model tensor-parallel, or by `layout`; `weights` is the type of
    matrices, None for one of `item_bytes`. "packed" ones are those that the checkpoint at `path` has quantised; they
    are counted with the scales of the finest groups that its format has."""
    is_packed = weights == "packed"
    if is_packed:
        weights = None
    quantization = quantization_of(resolve_checkpoint(path)) if is_packed and path else None
    quantized = quantized_layers(resolve_checkpoint(path), config) if quantization is not None else {}
    attention, mlp, held = _shares(config, ranks, layout, rank)
    stored_bytes = item_bytes if weights is None else STORED_BYTES[weights]
    scale_bytes = SCALE_BYTES if weights in INT8 else 0
    parts = {"heads": attention, "kv_heads": min(attention, config.num_kv_heads), "mlp": mlp, "whole": 1}
    names = config.names
    count = item_bytes * -(-config.vocab_size // ranks) * config.head_bias
    for stack in (config, *([] if config.encoder is None else [config.encoder])):
        split = (names.head_bias, f"{stack.names.relative_bias}.weight")
        count += item_bytes * sum(math.prod(shape) for name, shape in end_tensors(stack) if name not in split)
        if stack.relative_bias is not None:
            count += item_bytes * stack.relative_bias.num_buckets * stack.num_heads // ranks
        count += item_bytes * stack.max_positions * stack.hidden_size * (stack.positions == "sinusoidal")
        num_held = held if stack is config else stack.num_layers
        # all attention is counted with the first kind of block, of which only some have another MLP
        num_dense = len([i for i in stack.dense_layers if i < stack.num_layers])
        kinds = [(stack.of_layer(-1), stack.num_layers - num_dense, num_held)]
        kinds += [(stack.of_layer(min(stack.dense_layers)), num_dense, 0)] if num_dense else []
        for kind, num_layers, num_attention in kinds:
            blocks = replace(kind, num_layers=num_layers)
            count += _block_bytes(blocks, parts, num_attention, item_bytes, weights, quantized, quantization)
    is_shared = config.tied and attention == ranks and config.head is None  # embedding and head
    num_rows = -(-config.vocab_size // attention) + (0 if is_shared else -(-config.num_head_rows // ranks))
    columns = 0 if config.head is None else COLUMN_BYTES * config.num_head_rows
    return count + columns + num_rows * (config.hidden_size * stored_bytes + scale_bytes)


def _block_bytes(
    config: DecoderConfig,
    parts: Mapping[str, int],
    held: int,
    item_bytes: int,
    weights: str | None,
    quantized: Mapping[str, int],
    quantization: Quantization | None,
) -> int:
    """The blocks of a stack, `held` of them with attention; each kind of split divides by its number of `parts`."""
    stored_bytes = item_bytes if weights is None else STORED_BYTES[weights]
    scale_bytes, count = SCALE_BYTES if weights in INT8 else 0, 0
    # split by their inputs, so that every rank has all outputs; of experts each rank has some, and these whole
    routers = f"{config.names.router}.weight", f"{config.names.shared_gate}.weight"
    downs = [f"{config.names.shared}.{config.names.down}"] * bool(config.shared_size)
    by_inputs = tuple(
        [f"{name}.weight" for name in (config.names.o, *(downs if config.num_experts else [config.names.down]))]
    )
    for name, shape, split in block_tensors(config):
        is_attention = split in ("heads", "kv_heads") or name.startswith(f"{config.names.attention}.")
        num_layers = held if is_attention else config.num_layers
        is_stored = len(shape) == 2 and name not in routers
        size = math.prod(shape) // parts[split] * (stored_bytes if is_stored else item_bytes)
        if is_stored:
            size += scale_bytes * (shape[0] if name.endswith(by_inputs) else shape[0] // parts[split])
        if quantization is not None and (num_packed := min(quantized.get(name, 0), num_layers)):
            outputs, inputs = shape
            split_inputs = parts[split] if name.endswith(by_inputs) else 1
            share = outputs * split_inputs // parts[split], inputs // split_inputs
            count += num_packed * quantization.packing().num_bytes(*share)
            num_layers -= num_packed
        count += num_layers * size
    return count


def kv_bytes_per_slot(
    config: DecoderConfig, ranks: int, item_bytes: int, layout: LayerLayout | None = None, rank: int = 0
) -> int:
    """Bytes one token takes in the pool of such a rank, of `item_bytes` each number."""
    attention, _, held = _shares(config, ranks, layout, rank)
    return 2 * held * config.local_kv_heads(attention) * config.head_dim * item_bytes


def _shares(config: DecoderConfig, ranks: int, layout: LayerLayout | None, rank: int) -> tuple[int, int, int]:
    """Ranks that an attention and an MLP are split over, and layers whose attention this rank has."""
    if layout is None:
        return ranks, ranks, config.num_layers
    return 1, ranks if layout.mlp == "tensor" else 1, len(layout.held(rank))
