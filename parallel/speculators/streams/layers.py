"""Rows of streams in a target's own layers: what they begin with, and low-rank deltas that these rows alone get.

A stream is a row that stands for a token still to come, j positions behind a node; it runs through some layers of the
frozen target beside the node's own row or in a pass of its own. The deltas (LoRA, arXiv 2106.09685) are added where the
gate says, so all other rows are computed by the same arithmetic as without streams. Knows no passes and no sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from parallel.model.block import MLP, Block
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder, pack_weights
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.linear import ColumnLinear, OutputShare, RowLinear
from parallel.model.layers.rope import Rotation
from parallel.model.layers.weight import EVERY, Layer, Shard, TensorOptions
from parallel.model.weights import load_shards
from parallel.speculators.streams.layouts import StreamsConfig, stream_shapes


class Gate:
    """The rows of a pass that get deltas, int64 [n]; set before the layers run."""

    rows: Tensor


class GatedColumn(ColumnLinear):
    """A column layer of the target, which is not copied, and a delta on the gate's rows."""

    def __init__(
        self, base: ColumnLinear, inputs: int, rank: int, gate: Gate, **options: Unpack[TensorOptions]
    ) -> None:
        self.parts, self.weight, self.bias = base.parts, base.weight, base.bias
        self._gate = gate
        self.delta = [_whole("down", inputs, rank, **options), ColumnLinear(rank, base.parts, bias=False, **options)]

    def __call__(self, x: Tensor) -> Tensor:
        rows, (down, up) = self._gate.rows, self.delta
        return super().__call__(x).index_add_(0, rows, up(down(x.index_select(0, rows))))


class GatedRow(RowLinear):
    """The same of a row layer; the delta's inner sums are added up with the layer's own."""

    def __init__(
        self, base: RowLinear, inputs: int, outputs: int, rank: int, gate: Gate, **options: Unpack[TensorOptions]
    ) -> None:
        self.name, self.group, self.columns = base.name, base.group, base.columns
        self.weight, self.bias = base.weight, base.bias
        self._gate = gate
        self.down = RowLinear("down", inputs, rank, base.group, bias=False, **options)
        self.up = _whole("up", rank, outputs, **options)

    def __call__(self, x: Tensor) -> Tensor:
        rows = self._gate.rows
        added = self.up(self.down.share(x.index_select(0, rows)))
        return self.group.all_reduce(self.share(x).index_add_(0, rows, added))


class StreamLayers(Layer):
    """Layers over `blocks` of the target, whose weights they share, and its rotations; tensors are allocated
    uninitialised."""

    def __init__(
        self,
        config: StreamsConfig,
        target: DecoderConfig,
        blocks: Sequence[Block],
        rotations: Callable[[Tensor], Sequence[Rotation | None]],
        **options: Unpack[TensorOptions],
    ) -> None:
        self.config, self._target, self._rotations = config, target, rotations
        self.gate = Gate()
        self.embeddings = torch.empty(config.num_embeddings, target.hidden_size, **options)
        self._start, self._prune = (
            [_whole("down", target.hidden_size, rank, **options), _whole("up", rank, target.hidden_size, **options)]
            if rank
            else []
            for rank in (config.start_rank, config.prune_rank)
        )
        self.blocks = [self._gated(block, target, **options) for block in blocks] if config.rank else list(blocks)

    def _gated(self, block: Block, target: DecoderConfig, **options: Unpack[TensorOptions]) -> Block:
        """A block of the same weights, three of whose products get deltas: only the fused one of the MLP is as it
        was."""
        rank, gate, hidden = self.config.rank, self.gate, target.hidden_size
        queries = target.num_heads * target.head_dim
        assert block.attention is not None
        assert isinstance(block.mlp, MLP), "the target is of Llama's kind"
        gated = copy(block)
        gated.attention = attention = copy(block.attention)
        attention.qkv = GatedColumn(attention.qkv, hidden, rank, gate, **options)
        attention.o = GatedRow(attention.o, queries, hidden, rank, gate, **options)
        gated.mlp = mlp = copy(block.mlp)
        mlp.down = GatedRow(mlp.down, target.intermediate_size, hidden, rank, gate, **options)
        return gated

    def begin(self, nodes: Tensor) -> Tensor:
        """Residual streams of n nodes [n, H] -> those of their streams, [n, streams, H]; for a draft pass the nodes'
        rows are the embeddings of the newest tokens."""
        started = self.embeddings.expand(len(nodes), -1, -1)
        if self.config.reads_root:
            return torch.cat((nodes[:, None], started), 1)
        if self._start:
            down, up = self._start
            return started + up(down(nodes))[:, None]
        return started

    def early(self, hidden: Tensor) -> Tensor:
        """Residual streams below these layers, [n, H] -> what the target's norm and head make early logits of."""
        down, up = self._prune
        return hidden + up(down(hidden))

    def run(self, hidden: Tensor, plan: PassPlan, gated: Tensor) -> Tensor:
        """The residual stream of a pass [T, H] after these layers; rows `gated`, int64 [n], have deltas."""
        self.gate.rows = gated
        plan.attention.prepare()
        ropes = self._rotations(plan.positions)
        for block in self.blocks:
            hidden = block(hidden, ropes[block.windowed], plan.attention)
        return hidden

    def load(self, directory: Path) -> None:
        """Load from a checkpoint."""
        load_shards(self.shards(), stream_shapes(self.config, self._target), directory)
        for part in self._deltas():
            pack_weights(part)

    def _deltas(self) -> Iterator[Layer]:
        yield from self._start
        yield from self._prune
        for block in self.blocks if self.config.rank else ():
            assert block.attention is not None
            assert isinstance(block.mlp, MLP)
            assert isinstance(block.attention.qkv, GatedColumn)
            yield from block.attention.qkv.delta
            for row in (block.attention.o, block.mlp.down):
                assert isinstance(row, GatedRow)
                yield from (row.down, row.up)

    def shards(self) -> Iterator[Shard]:
        yield Shard("streams.embed", (EVERY, EVERY), self.embeddings)
        names = ["start"] * len(self._start) + ["prune"] * len(self._prune)
        for layer in self.config.layers if self.config.rank else ():
            names += [f"{layer}.{part}" for part in ("qkv", "qkv", "o", "o", "mlp", "mlp")]
        for name, delta in zip(names, self._deltas(), strict=True):
            assert isinstance(delta, ColumnLinear | RowLinear)
            yield from delta.shards(f"streams.{name}")


def open_stream_layers(directory: Path, config: StreamsConfig, decoder: Decoder) -> StreamLayers:
    """Load them beside their target."""
    options = TensorOptions(dtype=decoder.dtype, device=decoder.device)
    blocks = [decoder.layers[i] for i in config.layers]
    layers = StreamLayers(config, decoder.config, blocks, decoder.rotations, **options)
    layers.load(directory)
    return layers


def _whole(name: str, inputs: int, outputs: int, **options: Unpack[TensorOptions]) -> ColumnLinear:
    """One that every rank holds whole."""
    part: OutputShare = name, slice(0, outputs)
    return ColumnLinear(inputs, [part], bias=False, **options)
