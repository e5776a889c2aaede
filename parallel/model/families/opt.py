"""OPT (arXiv 2205.01068): learned positions, LayerNorm, biases everywhere and an MLP of two matrices with ReLU."""

from __future__ import annotations

from parallel.model.config import CheckpointNames, DecoderConfig
from parallel.model.families.fields import HfConfig, read_activation, refuse, require

_NAMES = CheckpointNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    blocks="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    o="out_proj",
    up="fc1",
    down="fc2",
)


def opt(hf: HfConfig) -> DecoderConfig:
    require(hf, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim")
    refuse(hf, "word_embed_proj_dim", hf["hidden_size"])
    if not hf.get("layer_norm_elementwise_affine", True):
        raise ValueError("layer_norm_elementwise_affine=False is not supported")
    before, bias = bool(hf.get("do_layer_norm_before", True)), bool(hf.get("enable_bias", True))
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_attention_heads"],
        head_dim=hf["hidden_size"] // hf["num_attention_heads"],
        intermediate_size=hf["ffn_dim"],
        norm_eps=1e-5,
        max_positions=hf.get("max_position_embeddings", 2048),
        rope=None,
        position_offset=2,
        tied=bool(hf.get("tie_word_embeddings", True)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norm="layer",
        norm_placement="before" if before else "after",
        final_norm=before and not hf.get("_remove_final_layer_norm", False),
        activation=read_activation(hf, "activation_function", "relu"),
        gated=False,
        names=_NAMES,
    )
