"""Bytes of a model on a rank, from its shapes alone: before a weight is read.

Loads no PyTorch, so that a process that only starts ranks need not either.
"""

from __future__ import annotations

import math

from parallel.model.checkpoint import block_tensors, end_tensors, resolve_checkpoint, stores_bfloat16
from parallel.model.config import DecoderConfig
from parallel.model.families.registry import read_config
from parallel.model.partition import LayerLayout

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STORED_BYTES = {**ITEM_BYTES, "int8": 1}
SCALE_BYTES = 4
"""Of every output of an int8 matrix."""
COLUMN_BYTES = 8
"""Of every row of a head that has only some: the place of its logit."""


def dtype_name(name: str, device: str) -> str:
    """`auto` is bfloat16 on a GPU and float32, in which tokens can be compared exactly, on a CPU."""
    if name == "auto":
        return "bfloat16" if device.startswith("cuda") else "float32"
    if name not in ITEM_BYTES:
        raise ValueError(f"dtype={name}: unknown; use auto, {', '.join(ITEM_BYTES)}")
    return name


def weights_name(weights: str, dtype: str, device: str, path: str = "", *, has_kernels: bool = True) -> str:
    """The type in which matrices are stored beside numbers of type `dtype`. `auto` is the same, or bfloat16 if the
    checkpoint at `path` is, which on a CPU with kernels is read faster and rounds nothing."""
    if weights == "auto":
        if not path or dtype != "float32" or device != "cpu" or not has_kernels:
            return dtype
        directory = resolve_checkpoint(path)
        return "bfloat16" if stores_bfloat16(directory, read_config(directory)) else dtype
    if device.startswith("cuda") or dtype != "float32":
        raise ValueError(
            f"weights={weights}: needs a CPU and dtype=float32; write device=cpu or drop weights={weights}"
        )
    return weights


def kv_item_bytes(kv_dtype: str, dtype: str) -> int:
    """Of a number in a KV row, by `target.kv_dtype` and the model's type."""
    return 1 if kv_dtype == "fp8" else ITEM_BYTES[dtype]


def weight_bytes(
    config: DecoderConfig,
    ranks: int,
    item_bytes: int,
    layout: LayerLayout | None = None,
    rank: int = 0,
    *,
    weights: str | None = None,
) -> int:
    """The weights of one of the `ranks` that share the model tensor-parallel, or by `layout`; `weights` is the type of
    matrices, None for one of `item_bytes`."""
    attention, mlp, held = _shares(config, ranks, layout, rank)
    stored_bytes = item_bytes if weights is None else STORED_BYTES[weights]
    scale_bytes = SCALE_BYTES if weights == "int8" else 0
    parts = {"heads": attention, "kv_heads": min(attention, config.num_kv_heads), "mlp": mlp, "whole": 1}
    count = item_bytes * sum(math.prod(shape) for _, shape in end_tensors(config))
    # split by their inputs, so that every rank has all outputs; of experts each rank has some, and these whole
    by_inputs = (f"{config.names.o}.weight", *([] if config.num_experts else [f"{config.names.down}.weight"]))
    for name, shape, split in block_tensors(config):
        num_layers = held if name.startswith(f"{config.names.attention}.") else config.num_layers
        is_stored = len(shape) == 2 and name != f"{config.names.router}.weight"
        size = math.prod(shape) // parts[split] * (stored_bytes if is_stored else item_bytes)
        if is_stored:
            size += scale_bytes * (shape[0] if name.endswith(by_inputs) else shape[0] // parts[split])
        count += num_layers * size
    is_shared = config.tied and attention == ranks and config.head is None  # embedding and head
    num_rows = -(-config.vocab_size // attention) + (0 if is_shared else -(-config.num_head_rows // ranks))
    columns = 0 if config.head is None else COLUMN_BYTES * config.num_head_rows
    return count + columns + num_rows * (config.hidden_size * stored_bytes + scale_bytes)


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
