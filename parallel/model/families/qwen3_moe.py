"""Qwen 3 mixtures of experts: Qwen 3 with experts for every MLP. Checkpoints with some dense MLPs are refused."""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import CheckpointNames, DecoderConfig
from parallel.model.families.fields import HfConfig, refuse, require
from parallel.model.families.qwen3 import qwen3

_NAMES = CheckpointNames(router="mlp.gate", experts="mlp.experts", gate="gate_proj", up="up_proj", down="down_proj")


def qwen3_moe(hf: HfConfig) -> DecoderConfig:
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
        names=_NAMES,
    )
