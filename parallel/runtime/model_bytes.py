"""Bytes of a model on a rank, from its shapes alone: before a weight is read and before a layout is chosen.

A CPU that packs its weights holds the matrices it multiplies by in two layouts. Loads no PyTorch, so that a process
that only starts ranks need not either.
"""

from __future__ import annotations

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


def weight_bytes(config: DecoderConfig, tp_size: int, item_bytes: int, *, packed: bool = False) -> int:
    """One tensor-parallel rank's weights."""
    copies = 2 if packed else 1
    layer = _attention(config, tp_size, copies) + _mlp(config, tp_size, copies) + _block_norms(config)
    tables = 1 if config.tied and not packed else 1 + copies
    vocab = -(-config.vocab_size // tp_size) * config.hidden_size * tables
    return (layer * config.num_layers + vocab + _ends(config)) * item_bytes


def kv_bytes_per_slot(config: DecoderConfig, tp_size: int, item_bytes: int) -> int:
    """Bytes one token takes in one tensor-parallel rank's pool."""
    return 2 * config.num_layers * config.local_kv_heads(tp_size) * config.head_dim * item_bytes


def layer_weight_bytes(
    config: DecoderConfig, layout: LayerLayout, rank: int, item_bytes: int, *, packed: bool = False
) -> int:
    """One layer-parallel rank's weights: the attention it runs, its share of the MLPs, embedding and share of head."""
    if layout.ranks == 1:
        return weight_bytes(config, 1, item_bytes, packed=packed)
    copies = 2 if packed else 1
    layer = _mlp(config, layout.ranks if layout.mlp == "tensor" else 1, copies) + _block_norms(config)
    vocab = (config.vocab_size + copies * -(-config.vocab_size // layout.ranks)) * config.hidden_size
    attention = len(layout.held(rank)) * _attention(config, 1, copies)
    return (attention + layer * config.num_layers + vocab + _ends(config)) * item_bytes


def layer_kv_bytes_per_slot(config: DecoderConfig, layout: LayerLayout, rank: int, item_bytes: int) -> int:
    """Bytes one token takes in one layer-parallel rank's pool."""
    return 2 * len(layout.held(rank)) * config.num_kv_heads * config.head_dim * item_bytes


# Below, counts of numbers.


def _attention(config: DecoderConfig, ranks: int, copies: int) -> int:
    heads, hidden = config.num_heads // ranks, config.hidden_size
    qkv = (heads + 2 * config.local_kv_heads(ranks)) * config.head_dim
    weights = copies * hidden * (qkv + heads * config.head_dim)
    return weights + config.qkv_bias * qkv + config.o_bias * hidden + config.qk_norm * 2 * config.head_dim


def _mlp(config: DecoderConfig, ranks: int, copies: int) -> int:
    hidden, columns = config.hidden_size, 2 if config.gated else 1
    middle = config.intermediate_size // (1 if config.num_experts else ranks)
    size = copies * (columns + 1) * hidden * middle + config.mlp_bias * (columns * middle + hidden)
    if not config.num_experts:
        return size
    return config.num_experts // ranks * size + copies * config.num_experts * hidden


def _norm(config: DecoderConfig) -> int:
    return config.hidden_size * (2 if config.norm == "layer" else 1)


def _block_norms(config: DecoderConfig) -> int:
    return _norm(config) * (4 if config.norm_placement == "around" else 2)


def _ends(config: DecoderConfig) -> int:
    """The final norm and the table of learned positions."""
    positions = 0 if config.rope else config.max_positions + config.position_offset
    return _norm(config) * config.final_norm + positions * config.hidden_size
