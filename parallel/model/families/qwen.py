"""Qwen 2, 2.5 and 3, and the mixtures of experts of Qwen 3."""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import CheckpointNames, DecoderConfig
from parallel.model.families.fields import HfConfig, refuse, require, sliding_layers
from parallel.model.families.llama import llama

_QWEN2 = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_MOE_NAMES = CheckpointNames(router="mlp.gate", experts="mlp.experts", gate="gate_proj", up="up_proj", down="down_proj")


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


def qwen3_moe(hf: HfConfig) -> DecoderConfig:
    """Qwen 3 with experts for every MLP. Checkpoints with some dense MLPs are refused."""
    hf = {"head_dim": None} | dict(hf)
    hf.setdefault("num_experts", hf.get("num_local_experts"))
    require(hf, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    refuse(hf, "mlp_only_layers")
    refuse(hf, "decoder_sparse_step", 1)
    config = qwen3(hf | {"intermediate_size": hf["moe_intermediate_size"]})
    if hf.get("use_sliding_window"):
        config = config.with_window(hf.get("sliding_window", 4096), range(config.num_layers))
    return replace(
        config,
        num_experts=hf["num_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        normalize_expert_weights=bool(hf.get("norm_topk_prob", False)),
        names=_MOE_NAMES,
    )
