"""The fields of a speculator's config.json that are read, with their types and ranges: those of published layouts
beside a decoder's, and our own in the section `speculator`.

What fields mean together is checked by the record (`check_record`). Loads no PyTorch; knows no layout.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta

from parallel.model.config_fields import MOST_LAYERS, Base, DecoderFields, Factor, Heads, Layers, Size, TokenId, Tokens
from parallel.speculators.config import STREAMS

Depths = Annotated[int, Meta(ge=0, le=1024)]
"""Tokens of a path; 0 for any number."""
Rank = Annotated[int, Meta(ge=0, le=2**22)]
Scale = Annotated[float, Meta(gt=0, le=1e6)]
Dimension = Size | Annotated[str, Meta(max_length=100)]
"""A number, or a text of one."""
LayerId = Annotated[int, Meta(ge=-1, le=MOST_LAYERS)]
"""The number of a layer of the target; -1 for its embedding."""
LayerIds = Annotated[list[LayerId], Meta(min_length=1, max_length=MOST_LAYERS)]
Tap = Annotated[int, Meta(ge=-MOST_LAYERS - 2, le=STREAMS)]


class OwnFields(TypedDict, total=False):
    """The section `speculator` of our own checkpoints, whatever their method."""

    method: str
    vocab_size: Tokens
    max_positions: Size
    target_hidden: Size
    taps: Annotated[list[Tap], Meta(min_length=1, max_length=MOST_LAYERS)]
    head_rows: Annotated[int, Meta(ge=0, le=2**24)]
    num_depths: Annotated[int, Meta(ge=1, le=1024)]
    exit: Layers
    kv_layer: Annotated[int, Meta(ge=0, le=MOST_LAYERS)]
    window: Annotated[int, Meta(ge=1, le=2**30)]
    num_heads: Depths
    inner: Rank
    num_blocks: Annotated[int, Meta(ge=0, le=MOST_LAYERS)]
    head: str
    own_embedding: bool
    tied: bool
    scale_input: bool
    linear_skip: bool
    block_bias: bool
    recurrent: bool
    layers: list[Annotated[int, Meta(ge=0, le=MOST_LAYERS)]]
    rank: Rank
    start_rank: Rank
    prune_rank: Rank
    reads_root: bool
    block_size: Depths
    mask_token_id: TokenId | None
    anchor_first: bool
    corrector: str
    corrector_rank: Rank
    state_size: Rank
    top_k: Annotated[int, Meta(ge=1, le=2**24)]
    conv_taps: Depths
    conv_group: Size
    confidence: bool
    embedding_scale: Scale | None
    logit_scale: Scale
    logit_softcap: Scale | None


class BlockFields(TypedDict, total=False):
    """Fields of published block drafters, at the top or in a section of their own."""

    target_layer_ids: LayerIds | None
    mask_token_id: TokenId | None
    block_size: Annotated[int, Meta(ge=1, le=1024)] | None
    input_embedding_scale: Scale
    output_multiplier: Scale
    conv_kernel_size: Annotated[int, Meta(ge=1, le=1024)] | None
    conv_group_size: Size | None
    selector_rank: Size | None
    selector_top_k: Tokens | None
    markov_rank: Rank | None
    markov_head_type: str
    gru_hidden_dim: Size | None
    pure_draft_prefix_len: Annotated[int, Meta(ge=0, le=1024)] | None
    emb_dim: Dimension | None


class EagleFields(TypedDict, total=False):
    eagle_aux_hidden_state_layer_ids: LayerIds | None


class ParamsFields(TypedDict, total=False):
    """params.json of a model in Meta's own layout."""

    dim: Size
    n_layers: Layers
    n_heads: Heads
    n_kv_heads: Heads | None
    vocab_size: Annotated[int, Meta(ge=-1, le=2**24)]
    multiple_of: Size
    ffn_dim_multiplier: Factor | None
    norm_eps: Annotated[float, Meta(ge=0, lt=1)]
    rope_theta: Base | None
    n_future_tokens: Annotated[int, Meta(ge=1, le=1024)]


class SpeculatorFields(DecoderFields, BlockFields, EagleFields, total=False):
    """The fields that any layout reads."""

    speculator: OwnFields | None
    dflash_config: BlockFields | None
    eagle_config: EagleFields | None
    transformer_layer_config: DecoderFields
    speculators_model_type: str | None
    num_nextn_predict_layers: Annotated[int, Meta(ge=0, le=MOST_LAYERS)]
    draft_vocab_size: Tokens | None
    target_hidden_size: Size | None
    medusa_num_heads: Annotated[int, Meta(ge=1, le=1024)] | None
    medusa_num_layers: Annotated[int, Meta(ge=0, le=1024)] | None
    num_heads: Annotated[int, Meta(ge=1, le=1024)] | None
    exit_dim: Size | None
    num_draft_layers: Annotated[int, Meta(ge=0, le=1024)] | None
    n_predict: Annotated[int, Meta(ge=1, le=1024)] | None
    inner_dim: Annotated[int, Meta(ge=0, le=2**22)] | Annotated[str, Meta(max_length=100)] | None
    proj_dim: Dimension | None
    input_hidden_dim: Size | None
    method: str
