"""Qwen 2, 2.5 and 3, and the mixtures of experts of Qwen 1.5, 2 and 3."""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import CheckpointNames, DecoderConfig
from parallel.model.families.fields import HfConfig, require, sliding_layers
from parallel.model.families.llama import llama

_QWEN2 = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_MOE_NAMES = CheckpointNames(
    router="mlp.gate",
    experts="mlp.experts",
    dense="mlp",
    shared="mlp.shared_expert",
    shared_gate="mlp.shared_expert_gate",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
)


def qwen2(hf: HfConfig) -> DecoderConfig:
    """A Llama with biases on queries, keys and values; a sliding window is switched on by layer."""
    hf = _QWEN2 | dict(hf)
    config = replace(llama(hf), qkv_bias=True, o_bias=False)
    if not hf.get("use_sliding_window"):
        return config
    after_full = range(min(config.num_layers, hf["max_window_layers"]), config.num_layers)
    return config.with_window(hf["sliding_window"], sliding_layers(hf, after_full))


def qwen3(hf: HfConfig) -> DecoderConfig:
    """Qwen 2 without its biases and with an RMSNorm on every query and key head."""
    hf = {"head_dim": 128} | dict(hf)
    bias = bool(hf.get("attention_bias", False))
    return replace(qwen2(hf), qkv_bias=bias, o_bias=bias, qk_norm=True)


def qwen2_moe(hf: HfConfig) -> DecoderConfig:
    """Qwen 2 with experts, and one more that all rows use."""
    require(hf, "shared_expert_intermediate_size")
    config = qwen2(dict(hf) | {"intermediate_size": hf.get("moe_intermediate_size")})
    bias = bool(hf.get("qkv_bias", True))
    return _with_experts(replace(config, qkv_bias=bias, shared_size=hf["shared_expert_intermediate_size"]), hf)


def qwen3_moe(hf: HfConfig) -> DecoderConfig:
    """Qwen 3 with experts."""
    hf = {"head_dim": None} | dict(hf)
    hf.setdefault("num_experts", hf.get("num_local_experts"))
    config = qwen3(hf | {"intermediate_size": hf.get("moe_intermediate_size")})
    if hf.get("use_sliding_window"):
        config = config.with_window(hf.get("sliding_window", 4096), range(config.num_layers))
    return _with_experts(config, hf)


def _with_experts(config: DecoderConfig, hf: HfConfig) -> DecoderConfig:
    """Adds experts to every `decoder_sparse_step`-th layer but `mlp_only_layers`; the others keep dense MLPs."""
    require(hf, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    step = hf.get("decoder_sparse_step") or 1
    dense = frozenset(hf.get("mlp_only_layers") or ()) | {i for i in range(config.num_layers) if (i + 1) % step}
    dense = frozenset(i for i in dense if i < config.num_layers)
    if dense:
        require(hf, "intermediate_size")
    if len(dense) == config.num_layers:
        raise ValueError("mlp_only_layers, decoder_sparse_step: leave no layer with experts; correct config.json")
    return replace(
        config,
        num_experts=hf["num_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        normalize_expert_weights=bool(hf.get("norm_topk_prob", False)),
        dense_layers=dense,
        dense_size=hf["intermediate_size"] if dense else 0,
        names=_MOE_NAMES,
    )
