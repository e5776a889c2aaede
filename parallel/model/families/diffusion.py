"""Masked-diffusion language models.

SDAR (arXiv 2510.06303), and TraDo, which has its layout, have the weights of Qwen 3; what differs is which rows see
each other, and that a masked row predicts its own token. LLaDA (2502.09992) and Dream (2508.15487) are a Llama and a
Qwen 2.5 whose rows see the whole text. Dream was made of a model that writes from left to right: a row predicts the
token behind it.
"""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import CheckpointNames, DecoderConfig, MaskedDiffusion
from parallel.model.families.fields import HfConfig, refuse, require
from parallel.model.families.llama import llama
from parallel.model.families.qwen import qwen2, qwen3, qwen3_moe

_SDAR = MaskedDiffusion(mask_token=151669, block_size=4)
_LLADA = MaskedDiffusion(mask_token=126336, block_size=32, sees_all=True)
_DREAM = MaskedDiffusion(mask_token=151666, block_size=32, sees_all=True, is_shifted=True)
"""What published checkpoints have, where config.json does not say it; blocks of LLaDA and Dream are FreeDave's."""
_LLADA_NAMES = CheckpointNames(
    embedding="model.transformer.wte",
    blocks="model.transformer.blocks",
    final_norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
    attention_norm="attn_norm",
    mlp_norm="ff_norm",
    attention="",
    o="attn_out",
    gate="ff_proj",
    up="up_proj",
    down="ff_out",
)
_LLADA_FIELDS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "mlp_hidden_size",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
    "rope_theta": "rope_theta",
}
"""Field of a Llama's config.json -> LLaDA's."""
_LLADA_WITHOUT = (
    "alibi",
    "attention_layer_norm",
    "bias_for_layer_norm",
    "include_bias",
    "input_emb_norm",
    "scale_logits",
)
_LLADA_ONLY = {"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True}


def sdar(hf: HfConfig) -> DecoderConfig:
    return _filling(qwen3(hf), hf, _SDAR)


def sdar_moe(hf: HfConfig) -> DecoderConfig:
    return _filling(qwen3_moe(hf), hf, _SDAR)


def dream(hf: HfConfig) -> DecoderConfig:
    return _filling(qwen2(hf), hf, _DREAM)


def llada(hf: HfConfig) -> DecoderConfig:
    refuse(hf, "block_group_size", 1)
    for name in _LLADA_WITHOUT:
        refuse(hf, name)
    for name, only in _LLADA_ONLY.items():
        refuse({name: hf.get(name) or "the default"}, name, only)
    require(hf, "d_model", "n_layers", "n_heads", "vocab_size", "max_sequence_length")
    fields = {name: hf[own] for name, own in _LLADA_FIELDS.items() if hf.get(own) is not None}
    fields.setdefault("intermediate_size", (hf.get("mlp_ratio") or 4) * hf["d_model"])
    if hf.get("n_kv_heads") is None:
        fields["num_key_value_heads"] = 1 if hf.get("multi_query_attention") else hf["n_heads"]
    fields |= {"vocab_size": hf.get("embedding_size") or hf["vocab_size"], "rms_norm_eps": hf.get("rms_norm_eps", 1e-5)}
    config = replace(llama(fields), qkv_bias=bool(hf.get("include_qkv_bias")), names=_LLADA_NAMES)
    return _filling(config, hf, _LLADA)


def _filling(config: DecoderConfig, hf: HfConfig, published: MaskedDiffusion) -> DecoderConfig:
    mask_token, block_size = hf.get("mask_token_id"), hf.get("block_size") or published.block_size
    mask_token = published.mask_token if mask_token is None else mask_token
    if mask_token >= config.vocab_size:
        raise ValueError(f"mask_token_id={mask_token}: is none of {config.vocab_size} tokens; correct config.json")
    if config.window is not None:
        raise ValueError("use_sliding_window: blocks that are filled see the whole text; correct config.json")
    return replace(config, diffusion=replace(published, mask_token=mask_token, block_size=block_size))
