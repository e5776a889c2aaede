"""The weights of draft layers, split over a group of ranks, and one pass through them, which training runs too.

Knows no sequences and no checkpoints' config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kernels.steps import join_rows
from parallel.model.block import Attention, Block
from parallel.model.checkpoint import find_tensors
from parallel.model.decoder import Decoder
from parallel.model.layers.attention import AttentionPlan, PassPlan
from parallel.model.layers.embedding import VocabTable
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.rope import Rotation
from parallel.model.layers.weight import EVERY, Shard, TensorOptions
from parallel.model.tensor_files import open_tensors
from parallel.speculators.eagle.config import DraftLayerConfig
from parallel.speculators.fusing import TapFuser, WholeRowsLinear
from parallel.speculators.own_layers import OwnLayers
from parallel.transfers import upload


class FirstLayer(Block):
    """The layer that reads pairs."""

    def __init__(self, config: DraftLayerConfig, group: Group, **options: Unpack[TensorOptions]) -> None:
        super().__init__(config.block, 0, 0, group, group, **options)
        hidden = config.block.hidden_size
        self.config = config
        self.embedding_norm = self.hidden_norm = self.join = None
        if config.joins_in_attention:
            self.attention = Attention(config.block, 0, group, windowed=self.windowed, inputs=2 * hidden, **options)
            self.hidden_norm = RMSNorm(hidden, config.block.norm_eps, **options)
        else:
            self.join = WholeRowsLinear("", 2 * hidden, hidden, group, bias=config.join_bias, **options)
        if config.norms_pair:
            self.embedding_norm, self.hidden_norm = (
                RMSNorm(hidden, config.block.norm_eps, **options) for _ in range(2)
            )

    def read(self, embedding: Tensor, features: Tensor, rope: Rotation | None, plan: AttentionPlan) -> Tensor:
        """embedding, features [T, H] -> the residual stream after the layer, [T, H]."""
        assert self.attention is not None
        stream, x = self.pair(embedding, features)
        return self.finish(stream, self.attention(x, rope, plan))

    def pair(self, embedding: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """embedding, features [T, H] -> the residual stream before the layer, [T, H], and what its attention reads: the
        stream, or both halves side by side, normalised, where there is no `join`."""
        normed, first = features, self.norms[0] if self.join is None else self.embedding_norm
        if first is not None and self.hidden_norm is not None:
            embedding, normed = first(embedding), self.hidden_norm(features)
        if self.join is None:
            return normed if self.config.norms_residual else features, join_rows(embedding, normed)
        pair = (normed, embedding) if self.config.hidden_first else (embedding, normed)
        stream = self.join(join_rows(*pair))
        return stream, self.norms[0](stream) if self.config.norms_first_input else stream

    def shards(self, prefix: str) -> Iterator[Shard]:
        names = self.config.names
        for shard in super().shards(prefix):
            if shard.destination is not self.norms[0].weight:
                yield shard
        if self.join is not None:
            yield from self.join.shards(names.join)
        else:
            yield from self.norms[0].shards(names.embedding_norm)
        if self.join is not None and self.config.norms_first_input:
            yield from self.norms[0].shards(f"{prefix}.{self.norm_names[0]}")
        if self.embedding_norm is not None:
            yield from self.embedding_norm.shards(names.embedding_norm)
        if self.hidden_norm is not None:
            yield from self.hidden_norm.shards(names.hidden_norm)


class DraftLayers(OwnLayers):
    """Pairs are read by the first of them. With `reads_fused`, features come as the fuser's vectors."""

    config: DraftLayerConfig

    def __init__(
        self,
        config: DraftLayerConfig,
        group: Group = SINGLE,
        *,
        reads_fused: bool = False,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__(config, group, **options)
        block = config.block
        assert (block.norm, block.norm_placement) == ("rms", "before"), "draft layers normalise as Llama does"
        hidden, eps = block.hidden_size, block.norm_eps
        self.embedding: VocabTable | None = None
        if config.own_embedding:
            self.embedding = VocabTable("embed_tokens.weight", config.vocab_size, hidden, group, **options)
        self._options = options
        self._reads_fused = reads_fused
        self.fuser = None
        if config.fuser is not None and (not reads_fused or config.num_depths > 1):  # which the features of masks need
            self.fuser = TapFuser(config.fuser, group, **options)
        self.first = FirstLayer(config, group, **options)
        self.rest = [Block(block, i, i, group, group, **options) for i in range(1, block.num_layers)]
        self.norm = RMSNorm(hidden, eps, **options) if config.has_final_norm else None
        self.lm_head: VocabTable | None = None
        if config.head_rows:
            name = f"{config.names.head}.weight"
            self.lm_head = VocabTable(name, config.head_rows, hidden, group, **options)
        self.mask_hidden = self.mask_embedding = None
        if config.num_depths > 1:
            self.mask_hidden = torch.empty(1, 1, config.feature_size, **options)
            self.mask_embedding = None if config.mask_token_id is not None else torch.empty(hidden, **options)
        self._columns: Tensor | None = None

    def load_vocabulary(self, directory: Path) -> None:
        """The tokens of an own head; ValueError naming the file if they do not fit."""
        config = self.config
        if config.has_draft_vocab:
            (file,) = find_tensors(directory, {"d2t": (config.head_rows,)}).values()
            with open_tensors(file) as tensors:
                offsets = tensors.get_tensor("d2t").long()
            columns = offsets + torch.arange(config.head_rows)
            if (
                int(columns.min()) < 0
                or int(columns.max()) >= config.vocab_size
                or len(columns.unique()) < len(columns)
            ):
                raise ValueError(f"{file}: d2t names tokens outside the target's vocabulary, or one twice")
            self._columns = columns.to(self._options["device"])

    @property
    def tokens_of_head(self) -> Tensor | None:
        """The tokens whose logits an own head gives, in its order; None: all."""
        return self._columns

    def fused(self, features: Tensor) -> Tensor:
        """The target's features, as they came, [T, F] -> the first layer's, [T, H]."""
        if self.fuser is None or self._reads_fused:
            return features.to(self._options["dtype"])
        return self.fuser(features)

    def mask_features(self, num_rows: int) -> Tensor:
        """The features of mask rows."""
        assert self.mask_hidden is not None
        assert self.fuser is not None
        return self.fuser(self.mask_hidden[0]).expand(num_rows, -1)

    def embed(self, token_ids: Tensor, tables: Decoder, masked: Sequence[int] = ()) -> Tensor:
        """Tokens [T] -> [T, H], by an own embedding or the target's, as stored. Rows `masked` have that of masks, where
        there is one."""
        rows = (self.embedding or tables.embedding).embed(token_ids)
        if masked and self.mask_embedding is not None:
            rows[upload(masked, rows.device)] = self.mask_embedding
        return rows

    def forward(self, embedding: Tensor, features: Tensor, plan: PassPlan) -> tuple[Tensor, Tensor]:
        """Embeddings of tokens and the features before them, [T, H] each -> what the head reads and what rows after
        them read."""
        plan.attention.prepare()
        return self.rows((embedding, features), [self.rope(plan.positions)], plan)

    def rows(self, entering: Sequence[Tensor], rotations: Sequence[Rotation], plan: PassPlan) -> tuple[Tensor, Tensor]:
        """The same with the rotations of the pass, whose attention is prepared."""
        (embedding, features), (rope,) = entering, rotations
        hidden = self.first.read(embedding, features, rope, plan.attention)
        for layer in self.rest:
            hidden = layer(hidden, rope, plan.attention)
        normed = hidden if self.norm is None else self.norm(hidden)
        return normed, normed if self.config.feeds_normed else hidden

    def head(self, normed: Tensor, tables: Decoder) -> Tensor:
        """[N, H] -> logits [N, V] of an own head, -inf for tokens that it lacks, or of the target's."""
        if self.lm_head is None:
            return tables.head(normed)
        logits = self.lm_head.logits(normed)
        if self._columns is None:
            return logits
        return logits.new_full((len(logits), self.config.vocab_size), -torch.inf).index_copy_(1, self._columns, logits)

    def shards(self) -> Iterator[Shard]:
        """Every checkpoint tensor this rank needs and where its part goes."""
        config, names = self.config, self.config.names
        if self.fuser is not None:
            yield from self.fuser.shards()
        yield from self.first.shards(config.layer_name(0))
        for i, layer in enumerate(self.rest, 1):
            yield from layer.shards(config.layer_name(i))
        if self.norm is not None:
            yield from self.norm.shards(names.final_norm)
        for table in (self.embedding, self.lm_head):
            if table is not None:
                yield from table.shards()
        for name, tensor in (("mask_hidden", self.mask_hidden), ("mask_embedding", self.mask_embedding)):
            if tensor is not None:
                yield Shard(name, (EVERY,) * tensor.ndim, tensor)
