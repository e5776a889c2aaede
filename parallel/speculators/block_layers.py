"""The layers of block drafters, and the record of their shape.

In every layer the keys and values of the committed text are projections of one vector per position, the normalised
product of the target's taps; it is no sequence that the layers update, so its keys and values are computed once for all
layers. Knows no sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Unpack, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.comm.group import Group
from parallel.model.block import Attention, Block
from parallel.model.checkpoint import Shape, block_tensors
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder
from parallel.model.layers.attention import AttentionPlan, PassPlan
from parallel.model.layers.linear import ColumnLinear
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.rope import Rope, Rotation, rotate
from parallel.model.layers.weight import EVERY, Layer, Shard, TensorOptions, Weight
from parallel.runtime.model_bytes import kv_bytes_per_slot
from parallel.speculators.config import FuserShape, SpeculatorConfig
from parallel.speculators.correctors import (
    Corrector,
    CorrectorKind,
    GruCorrector,
    MarkovCorrector,
    SelectorCorrector,
)
from parallel.speculators.fusing import TapFuser
from parallel.speculators.place import SpeculatorPlace

MASK = -1
"""In a pass's tokens: the mask, where the checkpoint has an embedding of its own for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(SpeculatorConfig):
    """One class of drafters; the methods are choices of its fields."""

    layers: DecoderConfig
    """Of the draft layers; its vocabulary and positions are the target's."""
    block_size: int
    """Rows of a block, the anchor's included."""
    mask_token_id: int | None
    """None: the mask has an embedding of its own."""
    anchor_first: bool = False
    """The anchor's row predicts the next token; else the first mask's row does."""
    corrector: CorrectorKind = "none"
    corrector_rank: int = 256
    state_size: int = 1024
    """corrector=gru: of the GRU."""
    top_k: int = 16
    """corrector=selector: candidates of a position."""
    conv_taps: int = 0
    """Rows that a convolution reads, 0 for none."""
    conv_group: int = 16
    confidence: bool = False
    embedding_scale: float | None = None
    """None: as the target scales its embedding and its logits. Published DFlash reads the bare tables."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def num_drafted(self) -> int:
        """Draft tokens of a block."""
        return self.block_size - (not self.anchor_first)

    @property
    def drafts_blocks(self) -> bool:
        return True

    def tensor_shapes(self) -> dict[str, Shape]:
        """Every tensor of a checkpoint."""
        return tensor_shapes(self)

    def check_record(self) -> None:
        super(BlockConfig, self).check_record()
        mask, hidden = self.mask_token_id, self.layers.hidden_size
        for wrong, line in (
            (self.num_drafted < 1, f"block_size={self.block_size}: drafts no token"),
            (mask is not None and mask >= self.vocab_size, f"mask_token_id={mask}: is no token of {self.vocab_size}"),
            (self.corrector not in get_args(CorrectorKind), f"corrector={self.corrector!r}: is none that is known"),
            (self.corrector != "none" and not self.corrector_rank, "corrector_rank=0: a corrector needs one"),
            (self.corrector == "gru" and not self.state_size, "state_size=0: a GRU needs one"),
            (
                self.conv_taps > 0 and hidden % self.conv_group,
                f"conv_group={self.conv_group}: must divide {hidden}",
            ),
        ):
            if wrong:
                raise ValueError(f"{line}; correct config.json, or fetch it again")

    def bytes_per_slot(self, ranks: int, item_bytes: int) -> int:
        return kv_bytes_per_slot(self.layers, ranks, item_bytes)

    @property
    def fuser(self) -> FuserShape:
        layers = self.layers
        return FuserShape(
            num_taps=len(self.taps),
            tap_size=self.target_hidden,
            outputs=layers.hidden_size,
            eps=layers.norm_eps,
            projection="fc",
            result_norm="hidden_norm",
        )


# --- layers -----------------------------------------------------------------------------------------------------------


class BlockConv(Layer):
    """Convolutions of a block's rows along the block, before and after a sublayer, in groups of channels: the weight of
    tap t is a constant of the channel plus a projection of the sublayer's input for the group. With base weights 1, 0,
    .. and a projection of 0 nothing changes."""

    def __init__(self, hidden: int, taps: int, group: int, block_size: int, **options: Unpack[TensorOptions]) -> None:
        self.taps, self.groups, self.block_size = taps, hidden // group, block_size
        self.base = torch.empty(2, taps, hidden, **options)
        self.project = Weight(2 * taps * self.groups, hidden, **options)

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of the input x [T, H] of the sublayer: what is added to the weights, [T, taps, groups], on either side."""
        first, second = self.project.multiply(x).view(len(x), 2, self.taps, self.groups).unbind(1)
        return first, second

    def __call__(self, x: Tensor, added: Tensor, side: int) -> Tensor:
        num_rows, groups = len(x), self.groups
        within = torch.arange(num_rows, device=x.device)[:, None] % self.block_size
        out = torch.zeros_like(x)
        for tap in range(self.taps):
            weights = self.base[side, tap].view(groups, -1) + added[:, tap, :, None]
            earlier = x if not tap else F.pad(x, (0, 0, tap, 0))[:num_rows].masked_fill(within < tap, 0)
            out += weights.view(num_rows, -1) * earlier
        return out

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield Shard(f"{prefix}.base_kernel", (EVERY, EVERY, EVERY), self.base)
        yield self.project.shard(f"{prefix}.kernel_projection.weight", EVERY)


class DraftBlock(Block):
    """A decoder block, with convolutions around its attention and its MLP if the checkpoint has them."""

    def __init__(self, config: BlockConfig, layer: int, group: Group, **options: Unpack[TensorOptions]) -> None:
        super().__init__(config.layers, layer, layer, group, group, **options)
        shape = config.layers.hidden_size, config.conv_taps, config.conv_group, config.block_size
        self.convs = [BlockConv(*shape, **options) for _ in range(2)] if config.conv_taps else []

    def __call__(self, x: Tensor, rope: Rotation | None, plan: AttentionPlan) -> Tensor:
        if not self.convs:
            return super().__call__(x, rope, plan)
        for i, (norm, conv) in enumerate(zip(self.norms, self.convs, strict=True)):
            normed = norm(x)
            before, after = conv.weights(normed)
            normed = conv(normed, before, 0)
            x = x + conv(self.mlp(normed) if i else self.own_attention(normed, rope, plan), after, 1)
        return x

    @property
    def own_attention(self) -> Attention:
        assert self.attention is not None
        return self.attention

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from super().shards(prefix)
        for name, conv in zip(("attention_conv", "mlp_conv"), self.convs, strict=False):
            yield from conv.shards(f"{prefix}.{name}")


class BlockLayers(Layer):
    """The draft layers on one group of ranks; `forward` is that of a decoder."""

    def __init__(self, config: BlockConfig, tables: Decoder, place: SpeculatorPlace) -> None:
        group, options, layers = place.group, place.options, config.layers
        layers.check_ranks(group.size)
        hidden, eps = layers.hidden_size, layers.norm_eps
        self.config = config
        self.group = group
        self.device = torch.device(place.device)
        bare = config.embedding_scale is not None or tables.positions is not None
        self._embed = tables.embedding.embed if bare else _scaled_embedding(tables)  # no parts of these layers
        self._head = tables.head if config.embedding_scale is None else tables.lm_head.logits
        self.fuser = None if place.reads_fused else TapFuser(config.fuser, group, **options)
        self.mask = torch.empty(1, hidden, **options) if config.mask_token_id is None else None
        self.blocks = [DraftBlock(config, i, group, **options) for i in range(layers.num_layers)]
        # The keys and values of the text in one product for all layers: a second copy of these weights, small beside
        # the layers, since a part of a packed matrix cannot be multiplied by.
        parts = [
            (f"layers.{i}.{layers.names.attention}.{name}", rows)
            for i, block in enumerate(self.blocks)
            for name, rows in block.own_attention.qkv.parts[1:]
        ]
        self.context_kv = ColumnLinear(hidden, parts, bias=layers.qkv_bias, **options)
        self.norm = RMSNorm(hidden, eps, **options)
        assert layers.rope is not None, "draft layers have rotary positions"
        self.rope = Rope(layers.rope, layers.head_dim, place.dtype, place.device)
        rank = config.corrector_rank
        self.corrector = self._make_corrector(rank, options)
        inputs = hidden + (rank if isinstance(self.corrector, MarkovCorrector) else 0)
        self.confidence: ColumnLinear | None = None
        if config.confidence:
            self.confidence = ColumnLinear(inputs, [("proj", slice(0, 1))], bias=True, **options)

    def _make_corrector(self, rank: int, options: TensorOptions) -> Corrector | None:
        config, vocab_size, hidden = self.config, self.config.vocab_size, self.config.layers.hidden_size
        match config.corrector:
            case "none":
                return None
            case "gru":
                return GruCorrector(vocab_size, hidden, rank, config.state_size, self.embed, **options)
            case "selector":
                return SelectorCorrector(vocab_size, hidden, rank, config.top_k, **options)
        return MarkovCorrector(config.corrector, vocab_size, hidden, rank, **options)

    def context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the text at these positions, as they came, [n, F] -> keys and values [layers, n, kv heads, head
        size]."""
        config = self.config.layers
        c = features if self.fuser is None else self.fuser(features)
        projected = self.context_kv(c).view(len(c), config.num_layers, 2, -1, config.head_dim)
        rotation = self.rope(positions)
        keys = []
        for i, block in enumerate(self.blocks):
            k, norms = projected[:, i, 0], block.own_attention.heads.norms
            keys.append(rotate(k if norms is None else norms[1](k), rotation))
        return torch.stack(keys), projected[:, :, 1].transpose(0, 1)

    def embed(self, token_ids: Tensor) -> Tensor:
        scale = self.config.embedding_scale
        return self._embed(token_ids) if scale in (None, 1.0) else self._embed(token_ids) * scale

    def head(self, hidden: Tensor) -> Tensor:
        config = self.config
        if config.embedding_scale is None:
            return self._head(hidden).float()
        logits = self._head(hidden).float() * config.logit_scale
        if config.logit_softcap is None:
            return logits
        return torch.tanh(logits / config.logit_softcap) * config.logit_softcap

    def forward(self, token_ids: Tensor, plan: PassPlan) -> Tensor:
        """Blocks of rows -> final hidden states."""
        plan.attention.prepare()
        rotation = self.rope(plan.positions)
        if self.mask is None:
            x = self.embed(token_ids)
        else:
            x = torch.where(token_ids[:, None] == MASK, self.mask, self.embed(token_ids.clamp(min=0)))
        for block in self.blocks:
            x = block(x, rotation, plan.attention)
        return self.norm(x)

    def shards(self) -> Iterator[Shard]:
        if self.fuser is not None:
            yield from self.fuser.shards()
        if self.mask is not None:
            yield Shard("mask_embedding", (EVERY, EVERY), self.mask)
        for i, block in enumerate(self.blocks):
            yield from block.shards(f"layers.{i}")
        for shard in self.context_kv.shards(""):
            yield replace(shard, name=shard.name.removeprefix("."))
        yield from self.norm.shards("norm")
        if self.corrector is not None:
            yield from self.corrector.shards()
        if self.confidence is not None:
            yield from self.confidence.shards("confidence_head")


def _scaled_embedding(tables: Decoder) -> Callable[[Tensor], Tensor]:
    return lambda token_ids: tables.embed(token_ids, token_ids)


def tensor_shapes(config: BlockConfig) -> dict[str, Shape]:
    """Every tensor of a checkpoint."""
    layers = config.layers
    hidden, vocab_size, rank, state = layers.hidden_size, config.vocab_size, config.corrector_rank, config.state_size
    shapes: dict[str, Shape] = config.fuser.tensor_shapes() | {"norm.weight": (hidden,)}
    if config.mask_token_id is None:
        shapes["mask_embedding"] = 1, hidden
    for i in range(layers.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape, _ in block_tensors(layers)}
        for conv in ("attention_conv", "mlp_conv") if config.conv_taps else ():
            shapes[f"layers.{i}.{conv}.base_kernel"] = 2, config.conv_taps, hidden
            groups = hidden // config.conv_group
            shapes[f"layers.{i}.{conv}.kernel_projection.weight"] = 2 * config.conv_taps * groups, hidden
    table, kind = (vocab_size, rank), config.corrector
    if kind in ("markov", "gated", "rnn"):
        shapes |= {f"markov_head.markov_w{i}.weight": table for i in (1, 2)}
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    elif kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = 3 * rank, hidden + 2 * rank
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    elif kind == "gru":
        sizes = {"ih": hidden, "hh": state}
        shapes |= {f"prefix_gru.weight_{name}_l0": (3 * state, size) for name, size in sizes.items()}
        shapes |= {"embed_proj.0.weight": (rank, hidden + state), "embed_proj.2.weight": table}
    elif kind == "selector":
        shapes |= {f"candidate_selector.{name}_codebook": table for name in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = rank, hidden
    if config.confidence:
        with_rank = kind in ("markov", "gated", "rnn")
        shapes["confidence_head.proj.weight"] = 1, hidden + (rank if with_rank else 0)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes
