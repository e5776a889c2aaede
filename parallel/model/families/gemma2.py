"""Gemma 2 (arXiv 2408.00118): norms scaled by 1 + w before and after attention and MLP, soft caps on attention and
final logits, a scaled embedding, and a sliding window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import CheckpointNames, DecoderConfig
from parallel.model.families.fields import HfConfig, read_activation, sliding_layers
from parallel.model.families.llama import llama

_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_NAMES = CheckpointNames(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def gemma2(hf: HfConfig) -> DecoderConfig:
    hf = _DEFAULTS | dict(hf)
    activation = read_activation(hf, "hidden_activation", "gelu_pytorch_tanh")
    config = llama(hf | {"hidden_act": activation})
    config = replace(
        config,
        norm="rms_plus_one",
        norm_placement="around",
        embedding_scale=config.hidden_size**0.5,
        attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=hf["attn_logit_softcapping"],
        logit_softcap=hf["final_logit_softcapping"],
        names=_NAMES,
    )
    return config.with_window(hf["sliding_window"], sliding_layers(hf, range(0, config.num_layers, 2)))
