"""Rows of streams in a target's own layers: what they begin with, and low-rank deltas that these rows alone get.

A stream is a row that stands for a token still to come, j positions behind a node; it runs through some layers of the
frozen target beside the node's own row or in a pass of its own. The deltas (LoRA, arXiv 2106.09685) are added where the
gate says, so all other rows are computed by the same arithmetic as without streams. Knows no passes and no sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from parallel.model.adapted import check_adaptable
from parallel.model.block import MLP, Block
from parallel.model.checkpoint import Shape
from parallel.model.config import DecoderConfig
from parallel.model.decoder import Decoder, pack_weights
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.linear import ColumnLinear, OutputShare, RowLinear
from parallel.model.layers.rope import Rotation
from parallel.model.layers.weight import EVERY, Layer, Shard, TensorOptions
from parallel.model.weights import load_shards
from parallel.speculators.config import FINAL, STREAMS
from parallel.speculators.heads.cells import HeadsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsConfig(HeadsConfig):
    """`num_heads` streams; `inner` is the width of the sampler that conditions a stream on the token before it, 0 for
    none."""

    layers: tuple[int, ...]
    """The target's layers that streams run through, from 0, ascending; in the verifying pass, its last ones."""
    rank: int
    """Rank of the deltas of every layer; 0 = none."""
    start_rank: int = 0
    """Rank of the map from the node's residual stream to what is added to a stream's embedding; 0: a stream begins as
    its embedding alone, as a mask does."""
    prune_rank: int = 0
    """Rank of what is added to the residual stream below the streams' layers for early logits; 0: there are none."""
    reads_root: bool = False
    """The first row is the newest token's own: the rows run in a draft pass rather than in the target's."""

    def check_target(self, target: DecoderConfig) -> None:
        super(StreamsConfig, self).check_target(target)
        check_adaptable(target)
        num_layers, layers = target.num_layers - target.stretch, self.layers
        if not num_layers:  # the target's tables alone
            return
        if not layers or list(layers) != sorted(set(layers)) or layers[-1] >= num_layers:
            raise ValueError(
                f"streams run through layers {list(layers)}; the target has {num_layers}; use one of its own"
            )
        if not self.reads_root and layers != tuple(range(layers[0], num_layers)):
            raise ValueError("streams of a verifying pass run through the target's last layers; use one made for it")

    @property
    def feature_size(self) -> int:
        return self.target_hidden if self.reads_root else self.num_heads * self.target_hidden

    @property
    def tap(self) -> int:
        return tap_of(reads_root=self.reads_root)

    @property
    def runs_target(self) -> bool:
        return self.reads_root

    @property
    def has_early_logits(self) -> bool:
        return self.prune_rank > 0

    @property
    def num_embeddings(self) -> int:
        """Learned rows."""
        return self.num_heads - self.reads_root


def tap_of(*, reads_root: bool) -> int:
    """A draft pass needs no features but counts by them which text the target has committed."""
    return FINAL if reads_root else STREAMS


def stream_shapes(config: StreamsConfig, target: DecoderConfig) -> dict[str, Shape]:
    """The tensors of streams in a checkpoint, by name."""
    hidden, inner, rank = target.hidden_size, target.intermediate_size, config.rank
    queries, keys = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    shapes: dict[str, Shape] = {"streams.embed": (config.num_embeddings, hidden)}
    if config.start_rank:
        shapes |= {"streams.start.down.weight": (config.start_rank, hidden)}
        shapes |= {"streams.start.up.weight": (hidden, config.start_rank)}
    parts = ("q", queries), ("k", keys), ("v", keys)
    if config.prune_rank:
        shapes |= {"streams.prune.down.weight": (config.prune_rank, hidden)}
        shapes |= {"streams.prune.up.weight": (hidden, config.prune_rank)}
    for layer in config.layers if rank else ():
        prefix = f"streams.{layer}"
        shapes |= {f"{prefix}.qkv.down.weight": (rank, hidden)}
        shapes |= {f"{prefix}.qkv.{name}_proj.weight": (size, rank) for name, size in parts}
        shapes |= {f"{prefix}.o.down.weight": (rank, queries), f"{prefix}.o.up.weight": (hidden, rank)}
        shapes |= {f"{prefix}.mlp.down.weight": (rank, inner), f"{prefix}.mlp.up.weight": (hidden, rank)}
    return shapes


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
