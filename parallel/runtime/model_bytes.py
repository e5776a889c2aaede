"""Bytes of a model on a rank, from its shapes alone: before a weight is read and before a layout is chosen.

A CPU that packs its weights holds the matrices it multiplies by in two layouts. Loads no PyTorch, so that a process
that only starts ranks need not either.
"""

from __future__ import annotations

import math

from parallel.model.checkpoint import block_tensors, end_tensors
from parallel.model.config import DecoderConfig
from parallel.model.partition import LayerLayout

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def dtype_name(name: str, device: str) -> str:
    """`auto` is bfloat16 on a GPU and float32, in which tokens can be compared exactly, on a CPU."""
    if name == "auto":
        return "bfloat16" if device.startswith("cuda") else "float32"
    if name not in ITEM_BYTES:
        raise ValueError(f"dtype={name}: unknown; use auto, {', '.join(ITEM_BYTES)}")
    return name


def weight_bytes(
    config: DecoderConfig,
    ranks: int,
    item_bytes: int,
    layout: LayerLayout | None = None,
    rank: int = 0,
    *,
    packed: bool = False,
) -> int:
    """The weights of one of the `ranks` that share the model tensor-parallel, or by `layout`."""
    attention, mlp, held = _shares(config, ranks, layout, rank)
    copies = 2 if packed else 1
    parts = {"heads": attention, "kv_heads": min(attention, config.num_kv_heads), "mlp": mlp, "whole": 1}
    numbers = sum(math.prod(shape) for _, shape in end_tensors(config))
    for name, shape, split in block_tensors(config):
        num_layers = held if name.startswith(f"{config.names.attention}.") else config.num_layers
        numbers += num_layers * math.prod(shape) // parts[split] * (copies if len(shape) == 2 else 1)
    is_shared = config.tied and not packed and attention == ranks  # embedding and head
    rows = [-(-config.vocab_size // size) for size in (attention, ranks)]
    numbers += (rows[0] + (0 if is_shared else copies * rows[1])) * config.hidden_size
    return numbers * item_bytes


def kv_bytes_per_slot(
    config: DecoderConfig, ranks: int, item_bytes: int, layout: LayerLayout | None = None, rank: int = 0
) -> int:
    """Bytes one token takes in the pool of such a rank."""
    attention, _, held = _shares(config, ranks, layout, rank)
    return 2 * held * config.local_kv_heads(attention) * config.head_dim * item_bytes


def _shares(config: DecoderConfig, ranks: int, layout: LayerLayout | None, rank: int) -> tuple[int, int, int]:
    """Ranks that an attention and an MLP are split over, and layers whose attention this rank has."""
    if layout is None:
        return ranks, ranks, config.num_layers
    return 1, ranks if layout.mlp == "tensor" else 1, len(layout.held(rank))
