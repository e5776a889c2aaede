"""Streams in training: rows behind anchors of a text that run through the frozen target's layers with low-rank deltas.

Each anchor's rows see the target's keys and values up to the anchor and the rows of their own anchor up to themselves;
row j learns the target's law of the token j + 1 places behind the anchor. The target's own rows are not run again: what
they left is in the batch. Parameters have the names of `parallel/speculators/streams/layers.py`. Knows no loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.model.adapted import check_adaptable
from parallel.model.config import DecoderConfig
from parallel.model.families.registry import read_config
from parallel.model.layers.rope import Rope, Rotation, rotate
from parallel.ranges import OneOf, Range
from parallel.speculators.config import FINAL
from parallel.speculators.heads.training import HeadLossOptions, HeadsNet
from parallel.speculators.streams.layers import StreamsConfig, stream_shapes, tap_of
from parallel.speculators.streams.runner import METHODS, StreamsCell
from parallel.training.interface import TargetBatch, TargetShape
from parallel.training.losses import divergences


@dataclass(frozen=True, slots=True)
class StreamsOptions(HeadLossOptions):
    """Settings of streams; `heads` is how many a node has."""

    method: Annotated[str, OneOf(METHODS)] = "streaming"
    """streaming, mask_lora: rows of the verifying pass; s3d: of a draft pass, of which the newest token's is one."""
    layers: Annotated[int, Range(0, zero="all")] = 0
    """streaming, mask_lora: the target's last layers that streams run through."""
    skip: Annotated[int, Range(0)] = 0
    """s3d: layers in the target's middle that the draft pass skips."""
    rank: Annotated[int, Range(0, zero="none")] = 32
    """Of the deltas of each layer's attention and MLP."""
    start_rank: Annotated[int, Range(0, zero="embeddings alone")] = 0
    """Of the map from a node's residual stream to what its streams begin with."""
    prune_rank: Annotated[int, Range(0, zero="none")] = 0
    """streaming: of early logits below the streams' layers, by which the target can give up unlikely nodes."""
    sampler: Annotated[int, Range(0, zero="none")] = 0
    """Width of the head that conditions a stream on the token before it."""


def build(options: StreamsOptions, target: TargetShape) -> StreamsNet:
    """A net whose deltas change nothing yet. ValueError, one line, for a target that it cannot have."""
    shape = read_config(target.config.to_dict())
    check_adaptable(shape)
    reads_root, count = options.method == "s3d", shape.num_layers
    if reads_root:
        first = (count - options.skip) // 2
        if first < 1 or options.layers or options.start_rank or options.prune_rank:
            raise ValueError(
                f"job.options.skip={options.skip}: a target of {count} layers keeps its first and its last, and s3d "
                "takes no layers, start_rank or prune_rank; lower it"
            )
        layers = (*range(first), *range(first + options.skip, count))
    else:
        if options.prune_rank and not 0 < options.layers < count:
            raise ValueError(f"job.options.prune_rank={options.prune_rank}: there are no layers to spare; set layers")
        if options.layers > count or options.skip:
            raise ValueError(
                f"job.options.layers={options.layers}: the target has {count}, and skip is of s3d alone; lower it"
            )
        layers = tuple(range(count - (options.layers or count), count))
    config = StreamsConfig(
        method=options.method,
        vocab_size=shape.vocab_size,
        max_positions=shape.max_positions,
        target_hidden=shape.hidden_size,
        taps=(tap_of(reads_root=reads_root),),
        num_heads=options.heads,
        inner=options.sampler,
        layers=layers,
        rank=options.rank,
        start_rank=options.start_rank,
        prune_rank=options.prune_rank,
        reads_root=reads_root,
    )
    assert target.model is not None, "streams run through the target's layers"
    net = StreamsNet(StreamsCell(config), options, shape, target.model)
    net.start_from(target)
    return net


class StreamsNet(HeadsNet):
    """Embeddings, deltas and sampler as parameters; the target is none."""

    config: StreamsConfig

    def __init__(self, cell: StreamsCell, options: StreamsOptions, shape: DecoderConfig, model: Any) -> None:
        super().__init__(cell, options)
        self._shape = shape
        frozen: Any = model.model  # whose blocks have the names of Llama's
        self._frozen = (frozen,)  # in a tuple, so that it is no part of this module
        self.kv_layers = cell.config.layers
        self.taps = (cell.config.layers[0],) if cell.config.start_rank or cell.config.prune_rank else ()
        assert shape.rope is not None
        self._rope = Rope(shape.rope, shape.head_dim, torch.float32, "cpu")
        for name, size in stream_shapes(cell.config, shape).items():
            self._declare(name, torch.zeros(size), is_table=name == "streams.embed")

    def start_from(self, target: TargetShape) -> None:
        """Deltas add nothing: of the two factors of each, the second is zero."""
        rms = float(target.embedding.square().mean().sqrt())
        nn.init.normal_(self.parameter("streams.embed"), std=rms)
        for name in self._keys:
            if name.endswith((".down.weight", "sampler.stream.weight")):
                nn.init.normal_(self.parameter(name), std=self.parameter(name).shape[1] ** -0.5)
            elif name == "sampler.token.weight":  # embeddings are small beside what the head reads
                nn.init.normal_(self.parameter(name), std=self.parameter(name).shape[1] ** -0.5 / rms)

    def loss(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """That of heads, and of the early logits against the target's law of the next token."""
        loss, metrics = super().loss(batch, generator)
        if not self.config.prune_rank:
            return loss, metrics
        rows, anchors = self._anchors(batch, generator)
        goals, early = batch.head(batch.taps[FINAL][rows, anchors]), self.early(batch, rows, anchors)
        value = divergences()["fkl"](goals, early).mean()
        return loss + value, metrics | {"early": value.detach()}

    def early(self, batch: TargetBatch, rows: Tensor, anchors: Tensor) -> Tensor:
        """Early logits [N, V] of the tokens after these."""
        nodes = batch.taps[self.config.layers[0]][rows, anchors].float()
        return batch.head(self._frozen[0].norm(nodes + self._delta("streams.prune", nodes)))

    def _anchors(self, batch: TargetBatch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Those of heads; an evaluation takes as many, evenly spaced, since each costs rows of the target's layers."""
        rows, anchors = super()._anchors(batch, generator)
        if len(rows) > self.options.anchors:
            chosen = torch.linspace(0, len(rows) - 1, self.options.anchors, device=rows.device).long()
            rows, anchors = rows[chosen], anchors[chosen]
        return rows, anchors

    def read_target(self, batch: TargetBatch, rows: Tensor, anchors: Tensor) -> Tensor:
        """Final states of the streams before these roots, side by side, [N, streams * H]."""
        order = rows.argsort(stable=True)
        counts = rows.bincount(minlength=len(batch.tokens))
        place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows[order]]
        grid = rows.new_zeros(len(batch.tokens), int(counts.max()))
        grid[rows[order], place] = anchors[order] - 1
        states = self.streams(batch, grid)
        return states[rows[order], place][order.argsort()].flatten(1)

    def streams(self, batch: TargetBatch, anchors: Tensor) -> Tensor:
        """Final states [B, A, streams, H] of the streams behind the rows at `anchors`, int64 [B, A]."""
        count, length, num_texts, num_anchors = self.options.heads, batch.tokens.shape[1], *anchors.shape
        positions = anchors[..., None] + torch.arange(1, count + 1, device=anchors.device)
        of_text = torch.arange(length, device=anchors.device) <= anchors[..., None]
        of_text = of_text.repeat_interleave(count, 1)
        own = torch.ones(count, count, dtype=torch.bool, device=anchors.device).tril()
        own = torch.block_diag(*[own] * num_anchors).expand(num_texts, -1, -1)
        sees = torch.cat((of_text, own), -1)[:, None]
        angles = self._rope(positions.flatten().cpu())
        cos, sin = (part.to(anchors.device).view(num_texts, -1, *part.shape[1:]) for part in angles)
        x = self._begin(batch, anchors).flatten(1, 2)
        for layer in self.config.layers:
            x = self._layer(layer, x, (cos, sin), batch.kv[layer], sees)
        return self._frozen[0].norm(x).unflatten(1, (num_anchors, count))

    def _begin(self, batch: TargetBatch, anchors: Tensor) -> Tensor:
        """[B, A, streams, H]."""
        embed = self.parameter("streams.embed").expand(*anchors.shape, -1, -1)
        if self.config.reads_root:
            roots = batch.embed(batch.tokens.gather(1, anchors + 1))
            return torch.cat((roots[:, :, None], embed), 2)
        if self.config.start_rank:
            tap = batch.taps[self.config.layers[0]]
            nodes = tap.gather(1, anchors[..., None].expand(-1, -1, tap.shape[-1])).float()
            return embed + self._delta("streams.start", nodes)[:, :, None]
        return embed

    def _layer(self, layer: int, x: Tensor, rotation: Rotation, kv: tuple[Tensor, Tensor], sees: Tensor) -> Tensor:
        block, shape = self._frozen[0].layers[layer], self._shape
        attention, mlp, has_deltas = block.self_attn, block.mlp, self.config.rank > 0
        normed = block.input_layernorm(x)
        q, k, v = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
        prefix = f"streams.{layer}"
        if has_deltas:
            low = F.linear(normed, self.parameter(f"{prefix}.qkv.down.weight"))
            q, k, v = (
                part + F.linear(low, self.parameter(f"{prefix}.qkv.{name}_proj.weight"))
                for part, name in zip((q, k, v), "qkv", strict=True)
            )
        q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in (q, k, v))
        if shape.qk_norm:
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (rotate(q, rotation), rotate(k, rotation), v))
        keys, values = (torch.cat((main.to(own.dtype), own), 2) for main, own in zip(kv, (k, v), strict=True))
        attended = F.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), sees, enable_gqa=True)
        attended = attended.transpose(1, 2).flatten(2)
        x = x + attention.o_proj(attended)
        x = x + self._delta(f"{prefix}.o", attended) if has_deltas else x
        normed = block.post_attention_layernorm(x)
        inner = F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed)
        x = x + mlp.down_proj(inner)
        return x + self._delta(f"{prefix}.mlp", inner) if has_deltas else x

    def _delta(self, prefix: str, x: Tensor) -> Tensor:
        low = F.linear(x, self.parameter(f"{prefix}.down.weight"))
        return F.linear(low, self.parameter(f"{prefix}.up.weight"))
