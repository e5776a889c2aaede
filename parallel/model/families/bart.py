"""BART (arXiv 1910.13461) and Marian (arXiv 1804.00344): encoder-decoders whose blocks normalise after each sum.

Both stacks share one embedding, which is the head too. BART has learned positions and normalises the embedding; Marian
has sines.
"""

from __future__ import annotations

import math
from dataclasses import replace

from parallel.model.config import CheckpointNames, DecoderConfig
from parallel.model.families.fields import HfConfig, read_activation, refuse, require

_POSITION_OFFSET = 2  # of BART's table


def bart(hf: HfConfig) -> DecoderConfig:
    return _encoder_decoder(hf, is_bart=True)


def marian(hf: HfConfig) -> DecoderConfig:
    if not hf.get("share_encoder_decoder_embeddings", True):
        raise ValueError(
            "share_encoder_decoder_embeddings=False is not supported: both stacks must have one vocabulary"
        )
    refuse(hf, "decoder_vocab_size", hf.get("vocab_size"))
    return _encoder_decoder(hf, is_bart=False)


def _encoder_decoder(hf: HfConfig, *, is_bart: bool) -> DecoderConfig:
    sizes = [f"{side}_{name}" for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")]
    require(hf, "vocab_size", "d_model", "max_position_embeddings", "decoder_start_token_id", *sizes)
    if not hf.get("tie_word_embeddings", True):
        raise ValueError("tie_word_embeddings=False is not supported with an encoder")
    if any(hf["d_model"] % hf[f"{side}_attention_heads"] for side in ("encoder", "decoder")):
        raise ValueError(f"d_model={hf['d_model']}: must be divided by the numbers of attention heads; correct it")
    if hf["decoder_start_token_id"] >= hf["vocab_size"]:
        raise ValueError(f"decoder_start_token_id={hf['decoder_start_token_id']}: is no token; correct config.json")
    encoder, decoder = (_stack(hf, side, is_bart=is_bart) for side in ("encoder", "decoder"))
    return replace(decoder, encoder=encoder, head_bias=True, text_start=(hf["decoder_start_token_id"],))


def _stack(hf: HfConfig, side: str, *, is_bart: bool) -> DecoderConfig:
    size, num_heads = hf["d_model"], hf[f"{side}_attention_heads"]
    is_decoder = side == "decoder"
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=size,
        num_layers=hf[f"{side}_layers"],
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=size // num_heads,
        intermediate_size=hf[f"{side}_ffn_dim"],
        norm_eps=1e-5,
        max_positions=hf["max_position_embeddings"],
        rope=None,
        positions="learned" if is_bart else "sinusoidal",
        position_offset=_POSITION_OFFSET if is_bart else 0,
        tied=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norm="layer",
        norm_placement="after",
        final_norm=False,
        embedding_norm=is_bart,
        embedding_scale=math.sqrt(size) if hf.get("scale_embedding") else None,
        activation=read_activation(hf, "activation_function", "gelu"),
        gated=False,
        names=CheckpointNames(
            embedding="model.shared",
            embedding_norm=f"model.{side}.layernorm_embedding",
            positions=f"model.{side}.embed_positions",
            blocks=f"model.{side}.layers",
            attention_norm="self_attn_layer_norm",
            mlp_norm="final_layer_norm",
            cross="encoder_attn" if is_decoder else "",
            cross_norm="encoder_attn_layer_norm" if is_decoder else "",
            o="out_proj",
            up="fc1",
            down="fc2",
            head_bias="final_logits_bias" if is_decoder else "",
        ),
    )
