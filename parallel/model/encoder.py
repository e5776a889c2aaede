"""An encoder: token ids of one source in, hidden states out, every row computed from all of them.

Its keys and values are of its own pass alone, so they stand in no pool. A source is encoded by itself: what it gives
does not depend on what else is served. Knows no pool, no decoder and no model families.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.model.block import BLOCKS, Block
from parallel.model.config import DecoderConfig
from parallel.model.layers.attention import AttentionPlan, Heads
from parallel.model.layers.embedding import InputRows, VocabTable
from parallel.model.layers.norm import NORMS, Norm
from parallel.model.layers.rope import Rotation
from parallel.model.layers.score_bias import ScoreBias
from parallel.model.layers.weight import Layer, Shard, TensorOptions


class MutualAttention(AttentionPlan):
    """Every row of the pass sees every other; no row is kept. `bias` [heads, T, T] is added to the scores."""

    def __init__(self, scale: float | None, bias: Tensor | None = None) -> None:
        self._scale = scale
        self._bias = bias

    def attend(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> Tensor:
        q, k, v = (part.transpose(0, 1) for part in heads.split(projected, rotation))
        group = heads.num_heads // heads.num_kv_heads
        k, v = (part.repeat_interleave(group, 0) if group > 1 else part for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, self._bias, scale=self._scale).transpose(0, 1).flatten(1)

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        raise AssertionError(f"an encoder keeps no rows, of layer {layer} or another")


class Encoder(Layer):
    """Split over the group as a decoder; `embedding` is the decoder's. Weights are allocated uninitialised."""

    def __init__(
        self, config: DecoderConfig, embedding: VocabTable, group: Group = SINGLE, **options: Unpack[TensorOptions]
    ) -> None:
        assert config.rope is None, "encoders with rotary positions are not known here"
        self.config = config
        self.input_rows = InputRows(config, embedding, **options)
        block = BLOCKS[config.norm_placement]
        self.layers: list[Block] = [block(config, i, i, group, group, **options) for i in range(config.num_layers)]
        self.bias: ScoreBias | None = None
        if config.relative_bias is not None:
            name = config.names.relative_bias
            self.bias = ScoreBias(config.relative_bias, name, config.num_heads, group, **options)
        self.norm: Norm | None = None
        if config.final_norm:
            self.norm = NORMS[config.norm](config.hidden_size, config.norm_eps, **options)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [S] -> [S, H]."""
        positions = torch.arange(len(token_ids), device=token_ids.device)
        hidden = self.input_rows(token_ids, positions)
        bias = None if self.bias is None else self.bias.of(positions - positions[:, None])
        plan = MutualAttention(self.config.attention_scale, bias)
        for layer in self.layers:
            hidden = layer(hidden, None, plan)
        return hidden if self.norm is None else self.norm(hidden)

    def shards(self) -> Iterator[Shard]:
        """Those of the embedding are the decoder's."""
        names = self.config.names
        yield from self.input_rows.shards()
        if self.bias is not None:
            yield from self.bias.shards()
        for i, layer in enumerate(self.layers):
            yield from layer.shards(self.config.block_name(i))
        if self.norm is not None:
            yield from self.norm.shards(names.final_norm)
