"""The record of draft layers: a few decoder layers over pairs of a token and the target's features one place before it.

EAGLE-1 to 3.1 and multi-token prediction (MTP) are such layers, and differ in where they put norms and projections:
fields here. Loads no PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parallel.model.checkpoint import Shape, block_tensors
from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig
from parallel.model.families.registry import read_config
from parallel.speculators.config import FINAL, FuserShape, LayersConfig, beside


@dataclass(frozen=True, slots=True)
class DraftLayerNames:
    """Names of a checkpoint's modules; `layers` has `{i}` where there may be several."""

    fuse: str = "fc"
    tap_norms: str = "fc_norm"
    features_norm: str = "input_norm"
    join: str = "join"
    embedding_norm: str = "midlayer.input_layernorm"
    hidden_norm: str = "midlayer.hidden_norm"
    layers: str = "midlayer"
    final_norm: str = "norm"
    head: str = "lm_head"


LISTED = DraftLayerNames(
    embedding_norm="layers.0.input_layernorm", hidden_norm="layers.0.hidden_norm", layers="layers.{i}"
)
"""Where the layers are a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayerConfig(LayersConfig):
    """The row of token j is computed from the pair (embedding of token j, features of position j - 1), and gives the
    logits of token j + 1. Behind the text the features are the output of the row before."""

    fuses: bool = False
    """A projection of all taps gives the features; without it there is one tap, as wide as the layers."""
    norms_taps: bool = False
    """Each tap is normalised before that projection (EAGLE-3.1)."""
    norms_features: bool = False
    """All taps together are."""
    joins_in_attention: bool = False
    """Queries, keys and values of the first layer read both halves of the pair, normalised, and the residual stream is
    the features (EAGLE-3); otherwise a projection of the pair is the first layer's input."""
    join_bias: bool = False
    norms_pair: bool = False
    """Both halves are normalised before that projection (MTP)."""
    hidden_first: bool = False
    """The features come before the embedding in that projection."""
    norms_residual: bool = False
    """The residual stream is the normalised features."""
    norms_first_input: bool = True
    """The first layer normalises its input (not EAGLE-1)."""
    has_final_norm: bool = True
    feeds_normed: bool = False
    """What follows the final norm is the next row's features, not what precedes it."""
    head_rows: int = 0
    """Tokens of an own head, which `d2t` of the checkpoint names if they are not all; 0: the target's head."""
    own_embedding: bool = False
    """It was trained with its own embedding, not the target's."""
    num_depths: int = 1
    """Above 1, one pass gives the logits of so many depths (P-EAGLE)."""
    mask_token_id: int | None = None
    """P-EAGLE: the token of mask rows. None: they have an embedding of their own."""
    names: DraftLayerNames = DraftLayerNames()

    def check_record(self) -> None:
        super(DraftLayerConfig, self).check_record()
        if self.head_rows > self.vocab_size:
            raise ValueError(f"{self.head_rows} tokens of an own head: are more than vocab_size={self.vocab_size}")
        if (self.num_depths > 1) != (self.method == "p_eagle"):
            raise ValueError(f"num_depths={self.num_depths}: p_eagle drafts 2 or more in a pass, others 1")
        if not self.fuses and self.taps != (FINAL,):
            raise ValueError(f"taps={list(self.taps)}: {self.method} reads the final hidden state, tap {FINAL}, alone")

    def check_target(self, target: DecoderConfig) -> None:
        super(DraftLayerConfig, self).check_target(target)
        if self.block.hidden_size != target.hidden_size:  # whose embedding its layers read
            raise ValueError(f"hidden_size={self.block.hidden_size}: is not the target's {target.hidden_size}")

    @property
    def fuser(self) -> FuserShape | None:
        names = self.names
        if not self.fuses:
            return None
        return FuserShape(
            num_taps=len(self.taps),
            tap_size=self.target_hidden,
            outputs=self.block.hidden_size,
            eps=self.block.norm_eps,
            projection=names.fuse,
            tap_norms=names.tap_norms if self.norms_taps else "",
            features_norm=names.features_norm if self.norms_features else "",
        )

    @property
    def drafts_blocks(self) -> bool:
        return self.num_depths > 1

    def bytes_per_slot(self, ranks: int, item_bytes: int) -> int:
        outputs = 0 if self.drafts_blocks else self.block.hidden_size * item_bytes  # which rows after it read
        return super(DraftLayerConfig, self).bytes_per_slot(ranks, item_bytes) + outputs

    @property
    def has_draft_vocab(self) -> bool:
        return 0 < self.head_rows < self.vocab_size

    def layer_name(self, i: int) -> str:
        """Where a name is that of one layer, further ones are numbered below it."""
        layers = self.names.layers
        return layers.format(i=i) if "{i}" in layers or not i else f"{layers}.{i}"

    def tensor_shapes(self) -> dict[str, Shape]:
        return dict(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Shape]]:
        names, hidden = self.names, self.block.hidden_size
        if self.fuser is not None:
            yield from self.fuser.tensor_shapes().items()
        if not self.joins_in_attention:
            yield f"{names.join}.weight", (hidden, 2 * hidden)
            if self.join_bias:
                yield f"{names.join}.bias", (hidden,)
        if self.joins_in_attention or self.norms_pair:
            yield f"{names.embedding_norm}.weight", (hidden,)
            yield f"{names.hidden_norm}.weight", (hidden,)
        for i in range(self.block.num_layers):
            yield from self._layer_tensors(i)
        if self.has_final_norm:
            yield f"{names.final_norm}.weight", (hidden,)
        if self.head_rows:
            yield f"{names.head}.weight", (self.head_rows, hidden)
        if self.has_draft_vocab:
            yield "d2t", (self.head_rows,)
        if self.own_embedding:
            yield "embed_tokens.weight", (self.vocab_size, hidden)
        if self.num_depths > 1:
            yield "mask_hidden", (1, 1, self.feature_size)
            if self.mask_token_id is None:
                yield "mask_embedding", (hidden,)

    def _layer_tensors(self, i: int) -> Iterator[tuple[str, Shape]]:
        hidden, attention = self.block.hidden_size, self.block.names.attention
        reads_pairs = (
            [f"{attention}.{name}_proj.weight" for name in "qkv"] if i == 0 and self.joins_in_attention else []
        )
        reads_bare = i == 0 and (self.joins_in_attention or not self.norms_first_input)
        for name, shape, _ in block_tensors(self.block):
            if reads_bare and name.startswith(f"{self.block.names.attention_norm}."):
                continue
            yield f"{self.layer_name(i)}.{name}", (shape[0], 2 * hidden) if name in reads_pairs else shape


METHODS: dict[str, dict[str, Any]] = {
    "eagle": {"norms_first_input": False, "has_final_norm": False, "names": DraftLayerNames(join="fc")},
    "eagle3": {"fuses": True, "joins_in_attention": True},
    "eagle3.1": {"fuses": True, "joins_in_attention": True, "norms_taps": True, "feeds_normed": True},
    "mtp": {
        "norms_pair": True,
        "feeds_normed": True,
        "names": DraftLayerNames(join="eh_proj", embedding_norm="enorm", hidden_norm="hnorm"),
    },
    "p_eagle": {"fuses": True, "joins_in_attention": True, "names": LISTED},
}
"""Method of our own checkpoints -> the fields that make it."""


def read_own(hf: HfConfig) -> DraftLayerConfig:
    """The record of a checkpoint that `job=train` made."""
    ours: dict[str, Any] = hf["speculator"]
    block = read_config(hf)
    fields = {name: ours[name] for name in ("head_rows", "num_depths") if name in ours}
    return draft_layer(ours["method"], block, tuple(ours["taps"]), **fields)


def draft_layer(method: str, block: DecoderConfig, taps: tuple[int, ...], **fields: Any) -> DraftLayerConfig:
    """The record of `method` over a target of the same vocabulary and width; `fields` replace those of the method."""
    return DraftLayerConfig(method=method, taps=taps, block=block, **beside(block) | METHODS.get(method, {}) | fields)
