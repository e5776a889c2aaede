"""Streams in training: rows behind anchors of a text that run through the frozen target's layers with low-rank deltas.

Each anchor's rows see the target's keys and values up to the anchor and the rows of their own anchor up to themselves;
row j learns the target's distribution of the token j + 1 places behind the anchor. The target's own rows are not run
again: what they left is in the batch. Knows no loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from parallel.comm.group import SINGLE
from parallel.model.block import Block
from parallel.model.config import DecoderConfig
from parallel.model.families.registry import read_config
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.rope import Rope
from parallel.model.layers.weight import TensorOptions
from parallel.ranges import OneOf, Range
from parallel.speculators.config import FINAL
from parallel.speculators.heads.training import HeadLossOptions, HeadsNet
from parallel.speculators.streams.layers import StreamLayers
from parallel.speculators.streams.layouts import StreamsConfig, stream_shapes, tap_of
from parallel.speculators.streams.runner import StreamsCell
from parallel.training.interface import TargetBatch, TargetShape
from parallel.training.layers import AnchoredAttention, TextAttention, load_parameters, use_gradients
from parallel.training.losses import divergences


@dataclass(frozen=True, slots=True)
class StreamsOptions(HeadLossOptions):
    """Settings of streams; `heads` is how many a node has."""

    method: Annotated[str, OneOf(("streaming", "mask_lora", "s3d"))] = "streaming"
    """streaming, mask_lora: rows of the verifying pass; s3d: of a draft pass, of which the newest token's is one."""
    layers: Annotated[int, Range(0, zero="all")] = 0
    """streaming, mask_lora: the target's last layers that streams run through."""
    skip: Annotated[int, Range(0)] = 0
    """s3d: layers in the target's middle that the draft pass skips."""
    rank: Annotated[int, Range(0, zero="none")] = 32
    """Rank of the deltas of each layer's attention and MLP."""
    start_rank: Annotated[int, Range(0, zero="embeddings alone")] = 0
    """Rank of the map from a node's residual stream to what its streams begin with."""
    prune_rank: Annotated[int, Range(0, zero="none")] = 0
    """streaming: rank of early logits below the streams' layers, by which the target can give up unlikely nodes."""
    sampler: Annotated[int, Range(0, zero="none")] = 0
    """Width of the head that conditions a stream on the token before it."""


def build(options: StreamsOptions, target: TargetShape) -> StreamsNet:
    """A net whose deltas change nothing yet. ValueError, one line, for a target that it cannot have."""
    shape = read_config(target.config.to_dict())
    shape.check_adaptable()
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
        self._frozen = (model,)  # in a tuple, so that it is no part of this module
        self.kv_layers = cell.config.layers
        self.taps = (cell.config.layers[0],) if cell.config.start_rank or cell.config.prune_rank else ()
        self.served = beside(cell.config, shape, model)
        use_gradients(self.served)
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
        """That of heads, and of the early logits against the target's distribution of the next token."""
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
        early = load_parameters(self.served, self.parameter).early(nodes)
        return batch.head(self._frozen[0].model.norm(early))

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
        layers, count = load_parameters(self.served, self.parameter), self.options.heads
        positions = anchors[..., None] + torch.arange(1, count + 1, device=anchors.device)
        sees = torch.arange(batch.tokens.shape[1], device=anchors.device) <= anchors[..., None]
        attends = [AnchoredAttention(count, sees, *batch.kv[layer], is_causal=True) for layer in self.config.layers]
        rows = layers.begin(self._nodes(batch, anchors).flatten(0, 1)).flatten(0, 1)
        plan = PassPlan(len(rows), positions.flatten(), None, TextAttention(len(anchors), attends))
        hidden = layers.run(rows, plan, torch.arange(len(rows), device=rows.device))
        return self._frozen[0].model.norm(hidden).view(*positions.shape, -1)

    def _nodes(self, batch: TargetBatch, anchors: Tensor) -> Tensor:
        """What streams begin beside, [B, A, H]: embeddings of roots, or residual streams of the rows at anchors."""
        if self.config.reads_root:
            return batch.embed(batch.tokens.gather(1, anchors + 1))
        tap = batch.taps.get(self.config.layers[0], batch.taps[FINAL])  # which one without a map does not read
        return tap.gather(1, anchors[..., None].expand(-1, -1, tap.shape[-1])).float()


def beside(config: StreamsConfig, target: DecoderConfig, model: Any) -> StreamLayers:
    """The layers of streams over those of a frozen model of transformers, whose parameters become views of the blocks'
    own, so that nothing is kept twice."""
    options, blocks = TensorOptions(dtype=torch.float32, device=model.device), list[Block]()
    assert target.rope is not None
    rope = Rope(target.rope, target.head_dim, **options)
    for place, layer in enumerate(config.layers):
        block = Block(target, layer, place, SINGLE, SINGLE, **options)
        for shard in block.shards("own"):
            parameter, own = model.model.layers[layer].get_parameter(shard.name.removeprefix("own.")), shard.place()
            assert isinstance(own, Tensor)
            own.copy_(parameter.data)
            parameter.data = own
        blocks.append(block)
    return StreamLayers(config, target, blocks, lambda positions: (rope(positions),), **options)
