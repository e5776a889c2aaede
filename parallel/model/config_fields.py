"""The fields of a checkpoint's config.json that are read, with their types and ranges: checked as the file is read.

Ranges are wider than every published model and narrow enough that nothing below runs for ever or out of memory on a
damaged file. A field may be absent; null is accepted where files have it. What fields mean together is the family's to
check. Loads no PyTorch; knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from parallel.ranges import errors_of
from parallel.typed_json import as_type, read_json

HfConfig = Mapping[str, Any]
"""The content of a checkpoint's config.json."""

MOST_LAYERS = 4096
Layers = Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
Size = Annotated[int, Meta(ge=1, le=2**22)]
"""Numbers of a vector."""
Tokens = Annotated[int, Meta(ge=1, le=2**24)]
"""Tokens of a vocabulary."""
TokenId = Annotated[int, Meta(ge=0, lt=2**24)]
Positions = Annotated[int, Meta(ge=1, le=2**30)]
Heads = Annotated[int, Meta(ge=1, le=2**14)]
Factor = Annotated[float, Meta(gt=0, le=1e6)]
Base = Annotated[float, Meta(gt=1, le=1e15)]
"""The base of rotary frequencies."""
Cap = Annotated[float, Meta(ge=0, le=1e9)]
"""A soft cap; 0 for none."""
StopToken = Annotated[int, Meta(ge=-1, lt=2**31)]
"""Some files write -1 for none."""
Block = Annotated[list[Size], Meta(min_length=2, max_length=2)]
"""Outputs and inputs that share a scale."""


class RopeEntry(TypedDict, total=False):
    rope_type: str | None
    type: str | None
    rope_theta: Base | None
    factor: Factor | None
    original_max_position_embeddings: Positions | None
    low_freq_factor: Factor | None
    high_freq_factor: Factor | None
    attention_factor: Factor | None
    beta_fast: Factor | None
    beta_slow: Factor | None
    mscale: Annotated[float, Meta(ge=0, le=1e6)] | None
    mscale_all_dim: Annotated[float, Meta(ge=0, le=1e6)] | None
    truncate: bool | None
    partial_rotary_factor: float


class RopeFields(RopeEntry, total=False):
    """One entry, or one for each kind of layer."""

    full_attention: RopeEntry | None
    sliding_attention: RopeEntry | None


class WeightScheme(TypedDict, total=False):
    type: str
    num_bits: int
    group_size: Annotated[int, Meta(ge=-1, le=2**20)] | None
    symmetric: bool
    block_structure: Block | None


class GroupFields(TypedDict, total=False):
    weights: WeightScheme | None


class QuantizationFields(TypedDict, total=False):
    quant_method: str
    format: str
    version: str
    checkpoint_format: str
    bits: int
    w_bit: int
    group_size: Annotated[int, Meta(ge=-1, le=2**20)] | None
    q_group_size: Annotated[int, Meta(ge=-1, le=2**20)] | None
    zero_point: bool
    weight_block_size: Block | None
    config_groups: dict[str, GroupFields] | None


class DecoderFields(TypedDict, total=False):
    """The fields that every family reads."""

    architectures: list[str] | str | None
    model_type: str | None
    vocab_size: Tokens | None
    hidden_size: Size | None
    num_hidden_layers: Layers | None
    num_attention_heads: Heads | None
    num_key_value_heads: Heads | None
    head_dim: Annotated[int, Meta(ge=1, le=2**14)] | None
    intermediate_size: Size | None
    ffn_dim: Size | None
    d_model: Size
    d_kv: Annotated[int, Meta(ge=1, le=2**14)]
    d_ff: Size
    num_layers: Layers
    num_decoder_layers: Layers | None
    num_heads: Heads
    n_positions: Positions | None
    relative_attention_num_buckets: Annotated[int, Meta(ge=4, le=2**12)]
    relative_attention_max_distance: Annotated[int, Meta(ge=2, le=2**20)]
    feed_forward_proj: str | None
    layer_norm_epsilon: Annotated[float, Meta(ge=0, lt=1)]
    scale_decoder_outputs: bool
    encoder_layers: Layers
    decoder_layers: Layers
    encoder_attention_heads: Heads
    decoder_attention_heads: Heads
    encoder_ffn_dim: Size
    decoder_ffn_dim: Size
    decoder_vocab_size: Tokens | None
    decoder_start_token_id: TokenId | None
    scale_embedding: bool | None
    share_encoder_decoder_embeddings: bool
    max_position_embeddings: Positions
    rms_norm_eps: Annotated[float, Meta(ge=0, lt=1)]
    hidden_act: str | None
    hidden_activation: str | None
    activation_function: str | None
    tie_word_embeddings: bool | None
    attention_bias: bool | None
    mlp_bias: bool | None
    enable_bias: bool | None
    do_layer_norm_before: bool | None
    layer_norm_elementwise_affine: bool
    _remove_final_layer_norm: bool | None
    rope_parameters: RopeFields | None
    rope_scaling: RopeFields | None
    rope_theta: Base | None
    rope_local_base_freq: Base | None
    partial_rotary_factor: float | None
    original_max_position_embeddings: Positions | None
    sliding_window: Annotated[int, Meta(ge=0, le=2**30)] | None
    sliding_window_pattern: Layers
    use_sliding_window: bool | None
    max_window_layers: Annotated[int, Meta(ge=0, le=2**30)]
    layer_types: list[str] | None
    query_pre_attn_scalar: Annotated[float, Meta(gt=0, le=1e9)]
    attn_logit_softcapping: Cap | None
    final_logit_softcapping: Cap | None
    num_experts: Annotated[int, Meta(ge=1, le=2**14)] | None
    num_local_experts: Annotated[int, Meta(ge=1, le=2**14)] | None
    num_experts_per_tok: Annotated[int, Meta(ge=1, le=2**14)] | None
    moe_intermediate_size: Size | None
    norm_topk_prob: bool | None
    mlp_only_layers: list[int] | None
    decoder_sparse_step: Annotated[int, Meta(ge=1, le=2**14)] | None
    shared_expert_intermediate_size: Size | None
    quantization_config: QuantizationFields | None
    compression_config: QuantizationFields | None
    eos_token_id: StopToken | list[StopToken] | None
    mask_token_id: TokenId | None
    block_size: Annotated[int, Meta(ge=1, le=1024)] | None
    n_layers: Layers | None
    n_heads: Heads | None
    n_kv_heads: Heads | None
    multi_query_attention: bool | None
    mlp_hidden_size: Size | None
    mlp_ratio: Annotated[int, Meta(ge=1, le=64)] | None
    max_sequence_length: Positions | None
    embedding_size: Tokens | None
    weight_tying: bool | None
    include_bias: bool | None
    include_qkv_bias: bool | None
    pard_token: TokenId
    pard_depth: Annotated[int, Meta(ge=1, le=1024)]
    pard_mutual: bool
    pard_steps: Annotated[int, Meta(ge=1, le=64)]


MASK_FIELD = "pard_token"
"""The token of the masks that a draft model is trained to fill; other models have no such field."""


def read_config_file(path: Path, fields: type = DecoderFields) -> dict[str, Any]:
    """The content of the config.json at `path` or in that directory; ValueError, one line, if it is damaged or a field
    of it is."""
    file = path / "config.json" if path.is_dir() else path
    content = read_json(file)
    with errors_of(str(file), "correct it, or fetch the file again"):
        check_fields(content, fields)
    return content


def check_fields(hf: HfConfig, fields: type = DecoderFields) -> None:
    """ValueError, one line, for the first of the `fields`, a TypedDict, that is of another type or out of its range."""
    as_type(hf, fields)
