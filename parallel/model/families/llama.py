"""Llama 2 and 3: RMSNorm before attention and MLP, rotary positions, grouped-query attention, a gated MLP.

Most families are a Llama with a few fields replaced.
"""

from __future__ import annotations

from typing import Any

from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig, read_activation, read_rope, require


def llama(hf: HfConfig) -> DecoderConfig:
    hf = dict[str, Any](max_position_embeddings=2048) | dict(hf)
    activation = read_activation(hf, "hidden_act", "silu")
    require(hf, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    attention_bias = bool(hf.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        intermediate_size=hf["intermediate_size"],
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        max_positions=hf["max_position_embeddings"],
        rope=read_rope(hf, hf.get("rope_parameters") or hf.get("rope_scaling")),
        tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        activation=activation,
    )
