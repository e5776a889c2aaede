"""T5 (arXiv 1910.10683), its version 1.1 and FLAN-T5: encoder-decoders with RMSNorm before attention and MLP, products
without biases, and a bias of scores by distance in place of positions."""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import Activation, CheckpointNames, DecoderConfig, RelativeBias
from parallel.model.families.fields import HfConfig, require

_FORMS: dict[str, tuple[Activation, bool]] = {
    "relu": ("relu", False),
    "gated-gelu": ("gelu_pytorch_tanh", True),
    "gated-silu": ("silu", True),
}
"""`feed_forward_proj` -> the activation, and whether the MLP has a gate."""
_POSITIONS = 512
"""The positions of published checkpoints, which have no table of them that would say how many there may be."""


def t5(hf: HfConfig) -> DecoderConfig:
    require(hf, "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets")
    form = hf.get("feed_forward_proj") or "relu"
    if form not in _FORMS:
        raise ValueError(f"feed_forward_proj={form!r} is not supported; supported is {', '.join(_FORMS)}")
    tied = hf.get("tie_word_embeddings") is not False
    if tied and hf.get("scale_decoder_outputs") is False:  # so transformers 5 writes it, whichever head there is
        remedy = "write tie_word_embeddings=false if the checkpoint has lm_head.weight"
        raise ValueError(f"scale_decoder_outputs=False: does not say whether the head is the embedding; {remedy}")
    encoder, decoder = (_stack(hf, side, form, tied=tied) for side in ("encoder", "decoder"))
    start = hf.get("decoder_start_token_id") or 0
    if start >= hf["vocab_size"]:
        raise ValueError(f"decoder_start_token_id={start}: is no token; correct config.json")
    return replace(decoder, encoder=encoder, head_scale=hf["d_model"] ** -0.5 if tied else None, text_start=(start,))


def _stack(hf: HfConfig, side: str, form: str, *, tied: bool) -> DecoderConfig:
    is_decoder = side == "decoder"
    activation, gated = _FORMS[form]
    last = 2 if is_decoder else 1
    mlp = f"layer.{last}.DenseReluDense"
    num_layers = (hf.get("num_decoder_layers") if is_decoder else None) or hf["num_layers"]
    distance = hf.get("relative_attention_max_distance") or 128
    buckets = hf["relative_attention_num_buckets"]
    if buckets % 4 or distance <= buckets:
        raise ValueError(f"relative_attention_num_buckets={buckets}: must be a multiple of 4 below {distance}")
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["d_model"],
        num_layers=num_layers,
        num_heads=hf["num_heads"],
        num_kv_heads=hf["num_heads"],
        head_dim=hf["d_kv"],
        intermediate_size=hf["d_ff"],
        norm_eps=hf.get("layer_norm_epsilon", 1e-6),
        max_positions=hf.get("n_positions") or _POSITIONS,
        rope=None,
        positions="none",
        relative_bias=RelativeBias(buckets, distance, both_ways=not is_decoder),
        attention_scale=1.0,
        tied=tied,
        activation=activation,
        gated=gated,
        names=CheckpointNames(
            embedding="shared",
            blocks=f"{side}.block",
            final_norm=f"{side}.final_layer_norm",
            attention="layer.0.SelfAttention",
            attention_norm="layer.0.layer_norm",
            cross="layer.1.EncDecAttention" if is_decoder else "",
            cross_norm="layer.1.layer_norm" if is_decoder else "",
            mlp_norm=f"layer.{last}.layer_norm",
            projections=("q", "k", "v"),
            o="o",
            gate=f"{mlp}.wi_0",
            up=f"{mlp}.wi_1" if gated else f"{mlp}.wi",
            down=f"{mlp}.wo",
            relative_bias=f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias",
        ),
    )
