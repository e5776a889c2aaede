"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts for every MLP; the weights of the chosen add to 1."""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import CheckpointNames, DecoderConfig
from parallel.model.families.fields import HfConfig, require
from parallel.model.families.mistral import mistral

_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "rope_theta": 1e6}
_NAMES = CheckpointNames(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gate="w1", up="w3", down="w2"
)


def mixtral(hf: HfConfig) -> DecoderConfig:
    hf = {"rms_norm_eps": 1e-5} | _DEFAULTS | dict(hf)
    require(hf, "num_local_experts", "num_experts_per_tok")
    return replace(
        mistral(hf),
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        names=_NAMES,
    )
