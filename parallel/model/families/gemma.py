"""Gemma 2 (arXiv 2408.00118) and Gemma 3, text only (2503.19786)."""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import CheckpointNames, DecoderConfig
from parallel.model.families.fields import HfConfig, read_activation, read_rope, sliding_layers
from parallel.model.families.llama import llama

_GEMMA2 = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {"max_position_embeddings": 131072, "final_logit_softcapping": None}
_NAMES = CheckpointNames(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def gemma2(hf: HfConfig) -> DecoderConfig:
    """Norms scaled by 1 + w before and after attention and MLP, soft caps on attention and final logits, a scaled
    embedding, and a sliding window in every other layer."""
    hf = _GEMMA2 | dict(hf)
    activation = read_activation(hf, "hidden_activation", "gelu_pytorch_tanh")
    config = llama(hf | {"hidden_act": activation})
    config = replace(
        config,
        norm="rms_plus_one",
        norm_placement="around",
        embedding_scale=config.hidden_size**0.5,
        attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=hf["attn_logit_softcapping"] or None,
        logit_softcap=hf["final_logit_softcapping"] or None,
        names=_NAMES,
    )
    return config.with_window(hf["sliding_window"], sliding_layers(hf, range(0, config.num_layers, 2)))


def gemma3(hf: HfConfig) -> DecoderConfig:
    """Gemma 2 with a norm on every query and key head in place of attention's soft cap, five windowed layers to a
    global one, and a rotary base of its own for each kind."""
    hf = _GEMMA3 | dict(hf)
    ropes = hf.get("rope_parameters") or {}
    around = {"rope_theta": hf.get("rope_theta", 1e6)} | (ropes.get("full_attention") or hf.get("rope_scaling") or {})
    near = {"rope_theta": hf.get("rope_local_base_freq", 1e4)} | (ropes.get("sliding_attention") or {})
    config = gemma2(hf | {"rope_parameters": around})
    config = replace(config, qk_norm=True, attention_softcap=None, local_rope=read_rope(hf, near))
    by_pattern = [i for i in range(config.num_layers) if (i + 1) % hf.get("sliding_window_pattern", 6)]
    return config.with_window(hf.get("sliding_window", 4096), sliding_layers(hf, by_pattern))
