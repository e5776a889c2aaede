"""The shape of a decoder: sizes, what its blocks are made of, and how its checkpoint names its tensors.

A model family (`families/`) fills the record from config.json. Loads no PyTorch; knows no weights and no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

NormKind = Literal["rms", "rms_plus_one", "layer"]
"""RMSNorm scaled by w, RMSNorm scaled by 1 + w, or LayerNorm with a bias."""
NormPlacement = Literal["before", "around", "after"]
"""Norms before attention and MLP; before and after each; or after each one's sum with the residual stream."""
Activation = Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"]
Positions = Literal["learned", "sinusoidal", "none"]
"""What is added to the embedding of a model without rotary positions."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Parameters of one scaling, under the names of `rope_parameters` in a checkpoint's config.json."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """Names of a checkpoint's modules. From `attention_norm` on they follow `{blocks}.{i}.`, and with experts `gate`,
    `up` and `down` follow `{blocks}.{i}.{experts}.{expert}.`, `{blocks}.{i}.{shared}.` for the expert that all rows
    use, and `{blocks}.{i}.{dense}.` in layers without experts. An empty `attention` is none: its projections are the
    block's own."""

    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""
    positions: str = ""
    blocks: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""
    attention: str = "self_attn"
    cross: str = ""
    cross_norm: str = ""
    projections: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = ""
    experts: str = ""
    dense: str = ""
    shared: str = ""
    shared_gate: str = ""
    head_bias: str = ""
    relative_bias: str = ""

    def in_attention(self, name: str) -> str:
        """The name within a block of what is in its attention."""
        return f"{self.attention}.{name}" if self.attention else name


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """A bias of every head's scores by the distance of key and query, in `num_buckets` (arXiv 1910.10683, section 2.1):
    near distances have buckets of their own, further ones share them, up to `max_distance`. In an encoder, whose rows
    see later ones (`both_ways`), half of the buckets are theirs."""

    num_buckets: int
    max_distance: int
    both_ways: bool


@dataclass(frozen=True, slots=True)
class MaskedDiffusion:
    """A decoder whose rows at `mask_token` predict their own tokens or, `is_shifted`, the tokens behind them. Rows of a
    block of `block_size` tokens see each other and all blocks before; blocks are aligned to the start of the text. Or,
    `sees_all`, rows see the whole text, and blocks only order what is filled, from the end of the prompt on."""

    mask_token: int
    block_size: int
    sees_all: bool = False
    is_shifted: bool = False


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of the head that are computed, and the column of `width` in which the logits of each stand.

    All other columns hold -inf: tokens that are never chosen.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    width: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder; what differs between families is a field.

    Layers in `windowed` attend to the last `window` positions, the others to all. Where `rope` is None, `positions` are
    added to the embedding: a table of `max_positions + position_offset` rows, or sines. `local_rope` replaces `rope` in
    windowed layers. `attention_scale` None is 1/sqrt(head_dim). Soft caps bound logits x by
    cap * tanh(x / cap). With `num_experts`, an MLP is a mixture of that many MLPs of `intermediate_size`, of which
    every token uses `experts_per_token`, and one more of `shared_size` unless that is 0; but in `dense_layers` it is
    one MLP of `dense_size`. The last `stretch` of `num_layers` layers add nothing to the residual stream:
    the same tokens at the cost of a larger model. `head` None computes the logits of the whole vocabulary.

    With an `encoder`, rows also attend to what it makes of a source, between their own attention and the MLP. It is a
    stack of blocks with the same embedding, whose rows all see each other. A text starts with `text_start`.
    `head_scale` multiplies what the head reads. With `diffusion` it fills masks instead of writing token by token.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    rope: RopeScaling | None
    tied: bool
    window: int | None = None
    windowed: frozenset[int] = frozenset()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm: NormKind = "rms"
    norm_placement: NormPlacement = "before"
    final_norm: bool = True
    activation: Activation = "silu"
    gated: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    normalize_expert_weights: bool = True
    shared_size: int = 0
    dense_layers: frozenset[int] = frozenset()
    dense_size: int = 0
    local_rope: RopeScaling | None = None
    position_offset: int = 0
    embedding_scale: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    names: CheckpointNames = CheckpointNames()
    stretch: int = 0
    head: HeadRows | None = None
    positions: Positions = "learned"
    embedding_norm: bool = False
    head_bias: bool = False
    head_scale: float | None = None
    relative_bias: RelativeBias | None = None
    encoder: DecoderConfig | None = None
    text_start: tuple[int, ...] = ()
    diffusion: MaskedDiffusion | None = None

    @property
    def num_head_rows(self) -> int:
        """Tokens whose logits are computed."""
        return self.vocab_size if self.head is None else len(self.head.rows)

    @property
    def num_logits(self) -> int:
        """Columns of a row of logits."""
        return self.vocab_size if self.head is None else self.head.width

    def block_name(self, layer: int) -> str:
        """The name of a layer in the checkpoint: a stretched one has the tensors of the last real one."""
        return f"{self.names.blocks}.{min(layer, self.num_layers - self.stretch - 1)}"

    def of_layer(self, layer: int) -> DecoderConfig:
        """The same decoder with the MLP of this layer in all of them."""
        if layer not in self.dense_layers:
            return replace(self, dense_layers=frozenset()) if self.dense_layers else self
        names, prefix = self.names, self.names.dense
        gate, up, down = (f"{prefix}.{name}" for name in (names.gate, names.up, names.down))
        dense = replace(names, gate=gate, up=up, down=down, router="", experts="")
        size = {"intermediate_size": self.dense_size, "dense_layers": frozenset(), "dense_size": 0}
        return replace(self, num_experts=0, experts_per_token=0, shared_size=0, names=dense, **size)

    def with_window(self, window: int | None, layers: Iterable[int]) -> DecoderConfig:
        """The same decoder with a sliding window in `layers`; without one if `window` is None or 0 or no layer is."""
        windowed = frozenset(layers)
        if not window or not windowed:
            window, windowed = None, frozenset()
        return replace(self, window=window, windowed=windowed)

    def stretched(self, num_layers: int) -> DecoderConfig:
        """The same model with `num_layers` more layers that change nothing but the cost."""
        if num_layers and self.norm_placement == "after":
            raise ValueError("stretch: a block that normalises the residual stream changes it; use stretch=0")
        total = self.num_layers + num_layers
        windowed = self.windowed
        if self.num_layers - 1 in windowed:
            windowed |= set(range(self.num_layers, total))
        dense = self.dense_layers
        if self.num_layers - 1 in dense:
            dense |= set(range(self.num_layers, total))
        changed = {"num_layers": total, "stretch": self.stretch + num_layers}
        return replace(self, **changed, windowed=windowed, dense_layers=dense)

    def check_ranks(self, size: int, key: str = "tp") -> None:
        """ValueError, which names the option `key`, unless the model can be split over `size` ranks."""
        if self.encoder is not None:
            self.encoder.check_ranks(size, key)
        if not self._divides(size):
            heads = f"num_attention_heads={self.num_heads}, num_key_value_heads={self.num_kv_heads}"
            units = f"num_experts={self.num_experts}" if self.num_experts else f"intermediate_size={self.mlp_units}"
            units += f", shared_expert_intermediate_size={self.shared_size}" * bool(self.shared_size)
            units += f", intermediate_size={self.dense_size}" * bool(self.dense_size)
            fitting = ", ".join(str(ranks) for ranks in range(1, self.num_heads + 1) if self._divides(ranks))
            raise ValueError(f"{key}={size}: ranks cannot share {heads} and {units} evenly; use one of {fitting}")

    def _divides(self, size: int) -> bool:
        """Whether `size` ranks have equal shares; where there are more ranks than KV heads, several hold the same."""
        kv_heads = self.num_kv_heads
        units = self.mlp_units, self.shared_size, self.dense_size
        return not (self.num_heads % size or any(one % size for one in units) or (kv_heads % size and size % kv_heads))

    def check_adaptable(self) -> None:
        """ValueError, one line, unless low-rank deltas of its matrices can be trained: for decoders of Llama's kind."""
        reasons = {
            f"norm={self.norm}": self.norm != "rms" or not self.final_norm,
            f"norm placement {self.norm_placement}": self.norm_placement != "before",
            "learned positions": self.rope is None,
            "sliding windows": self.window is not None,
            "experts": self.num_experts > 0,
            f"activation {self.activation}": self.activation != "silu" or not self.gated,
            "soft caps": self.attention_softcap is not None or self.logit_softcap is not None,
            "scaled embeddings": self.embedding_scale is not None or self.attention_scale is not None,
            "a trimmed vocabulary": self.head is not None,
        }
        if found := [reason for reason, is_so in reasons.items() if is_so]:
            raise ValueError(f"a model with {', '.join(found)} cannot be adapted; one of Llama's or Qwen's kind can")

    @property
    def norm_names(self) -> list[str]:
        """The norms of a block, as its checkpoint names them: of attention and MLP, then of what these put out."""
        names = self.names
        after = [names.attention_out_norm, names.mlp_out_norm] if self.norm_placement == "around" else []
        return [names.attention_norm, names.mlp_norm, *after]

    @property
    def mlp_units(self) -> int:
        """What ranks that split an MLP divide: its experts or, without them, its intermediate size."""
        return self.num_experts or self.intermediate_size

    def local_kv_heads(self, size: int) -> int:
        """KV heads per rank; with more ranks than heads each head is held by several ranks."""
        return max(1, self.num_kv_heads // size)

    def own_kv_heads(self, rank: int, size: int) -> slice:
        """The KV heads of one of so many ranks."""
        first = rank * self.num_kv_heads // size
        return slice(first, first + self.local_kv_heads(size))
