"""Mistral 7B, and Mixtral (arXiv 2401.04088)."""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import CheckpointNames, DecoderConfig
from parallel.model.families.fields import HfConfig, require
from parallel.model.families.llama import llama

_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
_MIXTRAL = dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=None, rope_theta=1e6, rms_norm_eps=1e-5)
_MIXTRAL_NAMES = CheckpointNames(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gate="w1", up="w3", down="w2"
)


def mistral(hf: HfConfig) -> DecoderConfig:
    """A Llama with a sliding window in every layer, where config.json sets one."""
    hf = _MISTRAL | dict(hf)
    return llama(hf).with_window(hf["sliding_window"], range(hf["num_hidden_layers"]))


def mixtral(hf: HfConfig) -> DecoderConfig:
    """Mistral with a mixture of experts for every MLP; the weights of the chosen experts add to 1."""
    hf = _MIXTRAL | dict(hf)
    require(hf, "num_local_experts", "num_experts_per_tok")
    num_experts, per_token = hf["num_local_experts"], hf["num_experts_per_tok"]
    return replace(mistral(hf), num_experts=num_experts, experts_per_token=per_token, names=_MIXTRAL_NAMES)
