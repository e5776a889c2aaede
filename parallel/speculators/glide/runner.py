"""GliDe (arXiv 2402.02082) and LongSpec (2502.17421): one decoder layer that also attends to keys and values of the
target's last layer.

A token's own row is its embedding, so rows of draft tokens are as exact as those of text. Between its attention over
these rows and its MLP, a row attends to the target's keys and values of all positions whose features are known: those
before the newest committed token, for every token of a draft. On the target's ranks it reads them in the target's pool
(`ReadPlan`); elsewhere they arrive as features and stand in the pool as a second layer, at their positions' rows.

LongSpec's layer attends to its own newest 513 rows alone (its release: a window of 512 to the left), normalises the
queries' input, has biases where the release has, and no final norm. Rows that left the window are freed where the pool
has no rows of the target, so that the layer's memory is constant in the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import Span, table_read
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text
from parallel.kv.row_limits import RowLimits
from parallel.model.block import Block
from parallel.model.layers.attention import AttentionShape, Heads, PassPlan
from parallel.model.layers.linear import ColumnLinear, RowLinear, even_rows
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.rope import rotate
from parallel.model.layers.weight import Shard, TensorOptions
from parallel.speculators.glide.layouts import GlideConfig
from parallel.speculators.own_layers import OwnLayers
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.runner import PooledRunner
from parallel.transfers import upload

_OWN, _TARGETS = 0, 1
"""Layers of the pool."""


class GlideLayers(OwnLayers):
    config: GlideConfig

    def __init__(self, config: GlideConfig, group: Group = SINGLE, **options: Unpack[TensorOptions]) -> None:
        super().__init__(config, group, **options)
        block = config.block
        hidden, queries = block.hidden_size, block.num_heads * block.head_dim
        self.layer = Block(block, 0, _OWN, group, group, **options)
        self.is_longspec = config.is_longspec
        self.q = ColumnLinear(hidden, [("q_proj", even_rows(queries, group))], bias=self.is_longspec, **options)
        self.o = RowLinear("o_proj", queries, hidden, group, bias=False, **options)
        self.norm = RMSNorm(hidden, block.norm_eps, **options)
        """GliDe: of what the head reads; LongSpec: of what the queries of the target's keys are made from."""
        own = self.layer.attention
        assert own is not None
        self.heads = Heads(_TARGETS, own.heads.num_heads, own.heads.num_kv_heads, block.head_dim, False, None)

    def attend(self, embedding: Tensor, plan: PassPlan) -> Tensor:
        """[T, H] -> with what each row reads of the rows before it, [T, H]."""
        plan.attention.prepare()
        return embedding + self.layer.attend(embedding, self.rope(plan.positions), plan.attention)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[N, H] -> this rank's queries of the target's keys, rotated, [N, heads, head size]."""
        x = self.norm(x) if self.is_longspec else x
        return rotate(self.q(x).view(len(x), -1, self.heads.head_dim), self.rope(positions))

    def finish(self, x: Tensor, crossed: Tensor) -> Tensor:
        """Rows and what their queries read of the target [N, H / ranks] -> what the head reads."""
        x = x + self.o(crossed)
        x = x + self.layer.mlp(self.layer.norms[1](x))
        return x if self.is_longspec else self.norm(x)

    def shards(self) -> Iterator[Shard]:
        if self.is_longspec:
            for shard in self.layer.shards("layer"):
                yield replace(shard, name=shard.name.removeprefix("layer."))
            yield from self.q.shards("cross_attn")
            yield from self.o.shards("cross_attn")
            yield from self.norm.shards("post_self_attention_layernorm")
            return
        yield from self.layer.shards("layer")
        yield from self.q.shards("cross")
        yield from self.o.shards("cross")
        yield from self.norm.shards("norm")


class GlideRunner(PooledRunner):
    """Every row is exact."""

    speculator: GlideConfig

    def __init__(self, layers: GlideLayers, place: SpeculatorPlace, *, backend: str | None = None) -> None:
        config = layers.config
        self._target = place.target if _reads_in_place(config, place) else None
        num_layers = 1 if self._target is not None else 2
        # backends that take indices for positions keep all rows
        drops = self._target is not None and str(place.device) == "cpu" and backend not in ("padded", "triton")
        self._limits = RowLimits(0, config.window) if drops and config.window is not None else None
        place = place if self._limits is None else place.keeping(self._limits)
        super().__init__(layers, place, num_layers, backend=backend)
        self.layers = layers
        self._heads = config.block.own_kv_heads(place.group.rank, place.group.size)
        self._num_written: dict[SeqId, int] = {}
        """Leading positions whose keys and values of the target are in the pool."""

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:  # noqa: ARG002
        super().open(seq_id)
        self._num_written[seq_id] = 0

    def close(self, seq_id: SeqId) -> None:
        super().close(seq_id)
        del self._num_written[seq_id]

    @property
    def kv_bytes(self) -> int:
        return self.pool.keys.nbytes + self.pool.values.nbytes

    @property
    def drops_rows(self) -> bool:
        return self._limits is not None

    def cached_len(self, seq_id: SeqId) -> int:
        return self.pool.text_len(seq_id)

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        super().commit(seq_id, keep, retain)
        limits = self._limits
        if limits is not None and (excess := self.pool.cached_len(seq_id) - limits.window) >= limits.page:
            self.pool.drop(seq_id, 0, excess, moved=False)

    def truncate(self, seq_id: SeqId, length: int) -> None:
        super().truncate(seq_id, length)
        self._num_written[seq_id] = min(self._num_written[seq_id], length)

    def drop_fuzzy(self, seq_id: SeqId) -> bool:  # noqa: ARG002  and features are kept until they were written
        return False

    def _read(self, spans: Sequence[Span], token_ids: Tensor, *, fuzzy: bool) -> Tensor:  # noqa: ARG002
        layers = self.layers
        plan = self._plan(spans)
        for span in spans:
            self._read_target(span.seq_id)
        x = plan.asked(layers.attend(self.decoder.embedding.embed(token_ids), plan))
        positions = plan.asked(plan.positions[: plan.num_rows])
        if not len(x):
            return x
        asked = [(span.seq_id, span.num_logits) for span in spans if span.num_logits]
        return layers.finish(x, self._cross(asked, layers.queries(x, positions)))

    def _read_target(self, seq_id: SeqId) -> None:
        """How far the target's keys and values of the text are there."""
        if self._target is None:
            self._write(seq_id)
            return
        features = self._features[seq_id]
        self._num_written[seq_id] = min(features.end, self._target.cached_len(seq_id))
        features.forget(features.end)

    def _write(self, seq_id: SeqId) -> None:
        """Put the target's keys and values of the text into the pool, as far as its rows are there."""
        features, written, pending = self._features[seq_id], self._num_written[seq_id], self._pending[seq_id]
        chain = next((row for row, parent in enumerate(pending.parents) if parent != row - 1), len(pending.parents))
        end = min(features.end, self.pool.cached_len(seq_id) + chain)
        if end <= written:
            return
        block = self.speculator.block
        rows = features.rows(range(written, end)).to(self.pool.keys)
        pair = rows.view(end - written, 2, block.num_kv_heads, block.head_dim)[:, :, self._heads]
        slots = upload(self.pool.slots(seq_id)[written:end], rows.device)
        self.pool.keys[_TARGETS].index_copy_(0, slots, pair[:, 0])
        self.pool.values[_TARGETS].index_copy_(0, slots, pair[:, 1])
        self._num_written[seq_id] = end
        features.forget(self.pool.cached_len(seq_id) - 1)  # rows from there on may be dropped and written again

    def _cross(self, asked: Sequence[tuple[SeqId, int]], queries: Tensor) -> Tensor:
        """[N, heads, head size], so many of each sequence -> what they read of the target's text, [N, heads * head
        size]; 0 if there is none."""
        pool = self.pool if self._target is None else self._target.pool
        reads = [table_read(pool, seq_id, num_rows, self._num_written[seq_id]) for seq_id, num_rows in asked]
        if self._target is None:
            return self._backend.plan_reads(reads).read(self.layers.heads, queries.flatten(1))
        in_place = replace(self.layers.heads, layer=self.speculator.kv_layer)
        return self._target.plan_reads(reads).read(in_place, queries.flatten(1))


def _reads_in_place(config: GlideConfig, place: SpeculatorPlace) -> bool:
    """Whether the target's pool has what the layer reads, as the layer reads it."""
    target = place.target
    if target is None or target.pool.is_fp8 or target.pool.dtype != place.dtype:
        return False
    theirs, own = target.decoder.attention_shape(), AttentionShape.of(config.block, place.group.size)
    return (own.group, own.scale, own.softcap) == (theirs.group, theirs.scale, theirs.softcap)


def open_runner(directory: Path, config: GlideConfig, place: SpeculatorPlace) -> GlideRunner:
    """Load the layer beside its target."""
    return GlideRunner(GlideLayers.opened(directory, config, place), place)
