"""Bytes of a model on a rank, from shapes alone: before a weight is read, and before a layout is chosen.

On a CPU that packs its weights, whatever is multiplied by is there in two layouts. Loads no PyTorch, so that whoever
only starts ranks need not either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from parallel.model.config import DecoderConfig
from parallel.model.partition import LayerLayout


class Width(Protocol):
    """What a number takes; a `torch.dtype` is one."""

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """A width without a type."""

    itemsize: int


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def dtype_name(name: str, device: str) -> str:
    """`auto` is bfloat16 on a GPU and float32, in which tokens can be compared exactly, on a CPU."""
    if name == "auto":
        return "bfloat16" if device.startswith("cuda") else "float32"
    if name not in ITEM_BYTES:
        raise ValueError(f"dtype={name}: unknown; use auto, {', '.join(ITEM_BYTES)}")
    return name


def weight_bytes(config: DecoderConfig, tp_size: int, dtype: Width, *, packed: bool = False) -> int:
    """One tensor-parallel rank's weights."""
    copies = 2 if packed else 1
    layer = _attention(config, tp_size, copies) + _mlp(config, tp_size, copies) + 2 * config.hidden_size
    tables = 1 if config.tied and not packed else 1 + copies
    vocab = -(-config.vocab_size // tp_size) * config.hidden_size * tables
    return (layer * config.num_layers + vocab + config.hidden_size) * dtype.itemsize


def kv_bytes_per_slot(config: DecoderConfig, tp_size: int, dtype: Width) -> int:
    """Bytes one token takes in one tensor-parallel rank's pool."""
    return 2 * config.num_layers * config.local_kv_heads(tp_size) * config.head_dim * dtype.itemsize


def layer_weight_bytes(
    config: DecoderConfig, layout: LayerLayout, rank: int, dtype: Width, *, packed: bool = False
) -> int:
    """One layer-parallel rank's weights: the attention it runs, its share of the MLPs, embedding and share of head."""
    if layout.ranks == 1:
        return weight_bytes(config, 1, dtype, packed=packed)
    copies, hidden = 2 if packed else 1, config.hidden_size
    mlp = _mlp(config, layout.ranks if layout.mlp == "tensor" else 1, copies) + 2 * hidden
    vocab = (config.vocab_size + copies * -(-config.vocab_size // layout.ranks)) * hidden
    attention = len(layout.held(rank)) * _attention(config, 1, copies)
    return (attention + mlp * config.num_layers + vocab + hidden) * dtype.itemsize


def layer_kv_bytes_per_slot(config: DecoderConfig, layout: LayerLayout, rank: int, dtype: Width) -> int:
    """Bytes one token takes in one layer-parallel rank's pool."""
    return 2 * len(layout.held(rank)) * config.num_kv_heads * config.head_dim * dtype.itemsize


def _attention(config: DecoderConfig, ranks: int, copies: int) -> int:
    heads, hidden = config.num_heads // ranks, config.hidden_size
    qkv = (heads + 2 * config.local_kv_heads(ranks)) * config.head_dim
    weights = copies * hidden * (qkv + heads * config.head_dim)
    return weights + config.qkv_bias * qkv + config.o_bias * hidden + config.qk_norm * 2 * config.head_dim


def _mlp(config: DecoderConfig, ranks: int, copies: int) -> int:
    middle, hidden = config.intermediate_size // ranks, config.hidden_size
    return copies * 3 * hidden * middle + config.mlp_bias * (2 * middle + hidden)
