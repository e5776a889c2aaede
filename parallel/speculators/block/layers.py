"""The layers of block drafters, split over a group of ranks.

In every layer the keys and values of the committed text are projections of one vector per position, the normalised
product of the target's taps; it is no sequence that the layers update, so its keys and values are computed once for all
layers. Knows no sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.model.block import Attention, Block
from parallel.model.decoder import Decoder
from parallel.model.layers.attention import AttentionPlan, PassPlan
from parallel.model.layers.linear import ColumnLinear
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.rope import Rotation, rotate
from parallel.model.layers.weight import EVERY, Layer, Shard, TensorOptions, Weight
from parallel.speculators.block.config import BlockConfig
from parallel.speculators.block.convolutions import convolve, convolved
from parallel.speculators.block.corrector_shapes import CorrectorMatrix, CorrectorShapes
from parallel.speculators.block.correctors import CORRECTORS
from parallel.speculators.fusing import TapFuser
from parallel.speculators.own_layers import OwnLayers

MASK = -1
"""Token of a pass that stands for the mask, where the checkpoint has an embedding of its own for it."""


class BlockConv(Layer):
    """The convolutions around one sublayer, on every rank."""

    def __init__(self, hidden: int, taps: int, group: int, block_size: int, **options: Unpack[TensorOptions]) -> None:
        self.taps, self.groups, self.block_size = taps, hidden // group, block_size
        self.base = torch.empty(2, taps, hidden, **options)
        self.project = Weight(2 * taps * self.groups, hidden, **options)

    def weights(self, x: Tensor) -> Tensor:
        return self.project.multiply(x).view(len(x), 2, self.taps, self.groups)

    def __call__(self, x: Tensor, added: Tensor, side: int) -> Tensor:
        return convolve(x, self.base[side], added[:, side], self.block_size)

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield Shard(f"{prefix}.base_kernel", (EVERY, EVERY, EVERY), self.base)
        yield self.project.shard(f"{prefix}.kernel_projection.weight", EVERY)


class DraftBlock(Block):
    """A decoder block, with convolutions around its attention and its MLP if the checkpoint has them."""

    def __init__(self, config: BlockConfig, layer: int, group: Group, **options: Unpack[TensorOptions]) -> None:
        super().__init__(config.block, layer, layer, group, group, **options)
        shape = config.block.hidden_size, config.conv_taps, config.conv_group, config.block_size
        self.convs = [BlockConv(*shape, **options) for _ in range(2)] if config.conv_taps else []

    def __call__(self, x: Tensor, rope: Rotation | None, plan: AttentionPlan) -> Tensor:
        if not self.convs:
            return super().__call__(x, rope, plan)
        sublayers = (lambda normed: self.own_attention(normed, rope, plan)), self.mlp
        for norm, conv, sublayer in zip(self.norms, self.convs, sublayers, strict=True):
            x = convolved(x, norm, conv, sublayer)
        return x

    @property
    def own_attention(self) -> Attention:
        assert self.attention is not None
        return self.attention

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from super().shards(prefix)
        for name, conv in zip(("attention_conv", "mlp_conv"), self.convs, strict=False):
            yield from conv.shards(f"{prefix}.{name}")


class CorrectorLinear(Layer):
    """One matrix of a corrector, with a bias if it has one."""

    def __init__(self, name: str, matrix: CorrectorMatrix, **options: Unpack[TensorOptions]) -> None:
        self.name, self.bias_name = name, matrix.bias
        self.weight = Weight(matrix.outputs, matrix.inputs, **options)
        self.bias = torch.empty(matrix.outputs, **options) if matrix.bias else None

    def shards(self) -> Iterator[Shard]:
        yield self.weight.shard(self.name, EVERY)
        if self.bias is not None:
            yield Shard(self.bias_name, (EVERY,), self.bias)


class LoadedCorrector(Layer):
    """The tensors of a corrector, whole on every rank: a step is a few small products, less than a message."""

    def __init__(
        self, shapes: CorrectorShapes, embed: Callable[[Tensor], Tensor], **options: Unpack[TensorOptions]
    ) -> None:
        self.cell = CORRECTORS[type(shapes)](shapes)
        self.embed = embed
        self.matrices = [CorrectorLinear(name, matrix, **options) for name, matrix in shapes.matrices.items()]
        self._by_name = {matrix.name: matrix for matrix in self.matrices}

    def linear(self, name: str, x: Tensor) -> Tensor:
        matrix = self._by_name[name]
        return matrix.weight.multiply(x, matrix.bias)

    def rows(self, name: str, token_ids: Tensor) -> Tensor:
        return self._by_name[name].weight.look_up(token_ids.reshape(-1)).view(*token_ids.shape, -1)

    def shards(self) -> Iterator[Shard]:
        for matrix in self.matrices:
            yield from matrix.shards()


class BlockLayers(OwnLayers):
    """The draft layers on one group of ranks, of which `embed` gives the embeddings of tokens; `forward` is that of a
    decoder."""

    config: BlockConfig

    def __init__(
        self,
        config: BlockConfig,
        group: Group = SINGLE,
        *,
        embed: Callable[[Tensor], Tensor],
        reads_fused: bool = False,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__(config, group, **options)
        block, hidden = config.block, config.block.hidden_size
        self._embed = embed
        self.fuser = None if reads_fused else TapFuser(config.fuser, group, **options)
        self.mask = torch.empty(1, hidden, **options) if config.mask_token_id is None else None
        self.blocks = [DraftBlock(config, i, group, **options) for i in range(block.num_layers)]
        # The keys and values of the text in one product for all layers: a second copy of these weights, small beside
        # the layers, since a part of a packed matrix cannot be multiplied by.
        parts = [
            (f"layers.{i}.{block.names.attention}.{name}", rows)
            for i, layer in enumerate(self.blocks)
            for name, rows in layer.own_attention.qkv.parts[1:]
        ]
        self.context_kv = ColumnLinear(hidden, parts, bias=block.qkv_bias, **options)
        self.norm = RMSNorm(hidden, block.norm_eps, **options)
        corrector = config.corrector_shapes()
        self.corrector = None if corrector is None else LoadedCorrector(corrector, self.embed, **options)
        inputs = hidden if corrector is None else corrector.confidence_inputs
        self.confidence: ColumnLinear | None = None
        if config.confidence:
            self.confidence = ColumnLinear(inputs, [("proj", slice(0, 1))], bias=True, **options)

    def context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the text at these positions, as they came, [n, F] -> keys and values [layers, n, kv heads, head
        size]."""
        config = self.config.block
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

    def head(self, hidden: Tensor, tables: Decoder) -> Tensor:
        config = self.config
        if config.embedding_scale is None:
            return tables.head(hidden).float()
        logits = tables.lm_head.logits(hidden).float() * config.logit_scale
        if config.logit_softcap is None:
            return logits
        return torch.tanh(logits / config.logit_softcap) * config.logit_softcap

    def forward(self, token_ids: Tensor, plan: PassPlan) -> Tensor:
        """Blocks of rows -> final hidden states."""
        plan.attention.prepare()
        return self.rows([self.enter(token_ids)], [self.rope(plan.positions)], plan)[0]

    def enter(self, token_ids: Tensor) -> Tensor:
        """Blocks of rows -> what the first layer reads."""
        if self.mask is None:
            return self.embed(token_ids)
        return torch.where(token_ids[:, None] == MASK, self.mask, self.embed(token_ids.clamp(min=0)))

    def rows(self, entering: Sequence[Tensor], rotations: Sequence[Rotation], plan: PassPlan) -> list[Tensor]:
        """What enters -> final hidden states, with the rotations of the pass, whose attention is prepared."""
        (x,), (rotation,) = entering, rotations
        for block in self.blocks:
            x = block(x, rotation, plan.attention)
        return [self.norm(x)]

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


def embedding_of(config: BlockConfig, tables: Decoder) -> Callable[[Tensor], Tensor]:
    """The target's embedding as it stores it, or, where the drafter says nothing of it, as the target scales it."""
    if config.embedding_scale is not None or tables.learns_positions:
        return tables.embedding.embed
    return lambda token_ids: tables.embed(token_ids, token_ids)
