"""Which rows of a long text a draft model keeps or sees: the newest behind some first ones, or chunks that matter.

`StreamingRows` frees rows and moves those behind to the positions of their indices, so that a model never sees a
position beyond its window (StreamingLLM, arXiv 2309.17453; TriForce, arXiv 2404.11912, section 4.2). A stored key is
rotated already, and rotations add up: one multiplication moves it. `RecentRows` and `ChunkRows` free nothing:
passes see a part of the rows, at the positions of the text. Chunks are those that the newest row attends to most, over
all heads and layers (TriForce, section 4.1, scores the mean key of each chunk, for each head; the sum of attention
weights does not blur a single key among others), and those around them: a text that repeats what stands far before it
needs the rows behind these next. Knows no draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from parallel.kv.pass_plan import Span, SpanRows
from parallel.kv.pool import KVPool, SeqId
from parallel.kv.row_limits import ChunkLimits, RowLimits
from parallel.kv.sequences import RowPolicy
from parallel.model.decoder import Decoder
from parallel.model.layers.attention import AttentionPlan, AttentionShape, Heads, PassPlan
from parallel.model.layers.rope import Rotation, rotate
from parallel.transfers import upload

RECENT = 8
"""One part in so many of the rows that chunks hold is the newest ones."""


class PartialRows(RowPolicy):
    """A policy of one runner's sequences."""

    drops_rows = False
    """Whether rows are freed, and those behind them have smaller positions than in the text."""

    def narrowed(self, rows: SpanRows, span: Span) -> SpanRows:  # noqa: ARG002
        return rows

    def after_commit(self, seq_id: SeqId) -> None:
        """Keep all rows."""

    def began(self, seq_id: SeqId, context: int) -> None:
        """The first pass of a draft behind so many rows is about to be laid out."""

    def watch(self, plan: PassPlan) -> None:
        """Observe a pass that is about to run."""

    def forget(self, seq_id: SeqId) -> None:
        """The sequence was closed."""


class StreamingRows(PartialRows):
    """Frees the other rows, a page at a time."""

    drops_rows = True

    def __init__(self, decoder: Decoder, pool: KVPool, limits: RowLimits) -> None:
        self._decoder = decoder
        self._pool = pool
        self._limits = limits

    def after_commit(self, seq_id: SeqId) -> None:
        pool, limits = self._pool, self._limits
        excess = pool.cached_len(seq_id) - limits.sinks - limits.window
        if excess < limits.page:
            return
        pool.drop(seq_id, limits.sinks, excess, moved=True)
        self._move_back(pool.slots(seq_id)[limits.sinks :], excess)

    @torch.inference_mode()
    def _move_back(self, slots: np.ndarray, distance: int) -> None:
        """Turn the keys in these slots, of committed and of pending rows, to positions that are so much smaller."""
        decoder, rows = self._decoder, upload(slots, self._pool.keys.device)
        turns = [rope and rope.turned_back(distance) for rope in (decoder.rope, decoder.local_rope or decoder.rope)]
        for kv_layer, layer in enumerate(decoder.held):
            turn = turns[decoder.layers[layer].windowed]
            assert turn is not None, "positions are rotations"
            self._pool.write_keys(kv_layer, rows, rotate(self._pool.read_keys(kv_layer, rows), turn))


class RecentRows(PartialRows):
    """Passes see the first and the newest rows."""

    def __init__(self, limits: RowLimits) -> None:
        self._limits = limits

    def narrowed(self, rows: SpanRows, span: Span) -> SpanRows:
        if not span.num_logits or rows.context <= self._limits.sinks + self._limits.window:
            return rows
        return rows.seeing(self._limits.recent(rows.context))


@dataclass(slots=True)
class _ChosenChunks:
    """Indices of the rows that were chosen when there were `context` rows, and the sum of each chunk's weights; sums of
    the choice before count half."""

    context: int
    rows: np.ndarray
    sums: np.ndarray


@dataclass(slots=True)
class _Drafted:
    """Where a sequence's newest draft began, and how many in a row had no token accepted."""

    context: int
    failures: int = 0
    is_due: bool = False

    def begin(self, context: int) -> None:
        self.failures = self.failures + 1 if context == self.context + 1 else 0
        self.context = context
        self.is_due = self.failures.bit_count() == 1  # the first, second, fourth and so on


class ChunkRows(PartialRows):
    """Passes that ask for logits see the chosen chunks and the rows since; once in a while one sees all, and chooses.

    Where the runner says where drafts begin, one sees all sooner if no token of the draft before was accepted, the
    more seldom the more of them failed. All ranks choose the same: weights are summed over them.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, limits: ChunkLimits) -> None:
        self._decoder = decoder
        self._pool = pool
        self._limits = limits
        self._chosen: dict[SeqId, _ChosenChunks] = {}
        self._drafted: dict[SeqId, _Drafted] = {}
        self._due: list[tuple[SpanRows, int]] = []
        self._watched: AttentionWeights | None = None

    def narrowed(self, rows: SpanRows, span: Span) -> SpanRows:
        self._choose()
        if not span.num_logits or rows.context <= self._limits.size * self._limits.num_chunks:
            return rows
        chosen = self._chosen.get(rows.seq_id)
        # rows of drafts may have been taken back since
        is_stale = chosen is None or abs(rows.context - chosen.context) >= self._limits.every or self._is_due(rows)
        if is_stale and not rows.first_pending:
            self._due.append((rows, span.num_text - 1))  # rows behind it are of drafts, which may be wrong
            return rows
        if chosen is None:
            return rows
        before = chosen.rows[chosen.rows < rows.context]
        return rows.seeing(np.concatenate((before, np.arange(chosen.context, rows.context))))

    def began(self, seq_id: SeqId, context: int) -> None:
        self._drafted.setdefault(seq_id, _Drafted(context)).begin(context)

    def _is_due(self, rows: SpanRows) -> bool:
        drafted = self._drafted.get(rows.seq_id)
        return drafted is not None and drafted.is_due and drafted.context == rows.context

    def watch(self, plan: PassPlan) -> None:
        if self._due:
            due, self._due = self._due, []
            shape = self._decoder.attention_shape()
            rows, newest = zip(*due, strict=True)
            self._watched = AttentionWeights(plan.attention, self._pool, shape, rows, newest)
            plan.attention = self._watched

    def forget(self, seq_id: SeqId) -> None:
        """Exchanges nothing with other ranks: one of them may have died, and the group be closed."""
        self._due = [(rows, asking) for rows, asking in self._due if rows.seq_id != seq_id]
        if self._watched is not None:
            self._watched.drop(seq_id)
        self._chosen.pop(seq_id, None)
        self._drafted.pop(seq_id, None)

    def _choose(self) -> None:
        """Chooses by the weights of the pass that was watched last."""
        if self._watched is None:
            return
        for rows, weights in zip(self._watched.rows, self._watched.sums, strict=True):
            group = self._decoder.group
            summed = group.all_reduce(weights) if group.size > 1 else weights
            sums = np.add.reduceat(summed.cpu().numpy(), np.arange(0, rows.context, self._limits.size))
            if rows.seq_id in self._chosen:
                before = self._chosen[rows.seq_id].sums[: len(sums)]  # of text that may have been taken back since
                sums[: len(before)] += before / 2
            self._chosen[rows.seq_id] = _ChosenChunks(rows.context, self._best(sums, rows.context), sums)
        self._watched = None

    def _best(self, sums: np.ndarray, context: int) -> np.ndarray:
        """Indices of the rows of the first chunk, of the newest ones, and of those with the largest sums of weights, in
        which a sum counts for the chunks around it too, half as much for each chunk between."""
        size, num_chunks = self._limits.size, self._limits.num_chunks
        newest = len(sums) - max(1, num_chunks // RECENT)
        around = sums.copy()
        around[0] = 0.0  # what all attend to says nothing of the chunks beside it
        around[newest:] = 0.0
        for _ in range(self._limits.reach):
            inner = around.copy()
            around[1:] = np.maximum(around[1:], inner[:-1] / 2)
            around[:-1] = np.maximum(around[:-1], inner[1:] / 2)
        around[0] = np.inf
        around[newest:] = np.inf
        chunks = np.sort(np.argsort(-around, kind="stable")[:num_chunks])
        rows = (chunks[:, None] * size + np.arange(size)).reshape(-1)
        return rows[rows < context]


@dataclass(slots=True)
class AttentionWeights:
    """An attention plan that also sums up, over heads and layers, the weights of one row of each of `rows`, the
    `asking`-th that it feeds, on its sequence's committed rows, float32 [context] each."""

    plan: AttentionPlan
    pool: KVPool
    shape: AttentionShape
    rows: Sequence[SpanRows]
    asking: Sequence[int]
    bucketed: bool = False  # no captured pass
    sums: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = self.pool.keys.device
        self.sums = [torch.zeros(rows.context, device=device) for rows in self.rows]
        # with a copy of their slots, which the next change of the table does not reach
        self.rows = [replace(rows, table=rows.slots.copy()) for rows in self.rows]

    def drop(self, seq_id: SeqId) -> None:
        """Leave out the row of a sequence; the pass is over, or was given up."""
        kept = [i for i, rows in enumerate(self.rows) if rows.seq_id != seq_id]
        self.asking, self.sums = [self.asking[i] for i in kept], [self.sums[i] for i in kept]
        self.rows = [self.rows[i] for i in kept]

    def prepare(self) -> None:
        self.plan.prepare()

    def attend(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> Tensor:
        places = [rows.first + asking for rows, asking in zip(self.rows, self.asking, strict=True)]
        asking = upload(places, projected.device)
        turned = rotation and (rotation[0].index_select(0, asking), rotation[1].index_select(0, asking))
        queries, _, _ = heads.split(projected.index_select(0, asking), turned)
        result = self.plan.attend(heads, projected, rotation)
        for i, rows in enumerate(self.rows):
            run, context = rows.run, rows.context
            slots = upload(rows.slots[:context], projected.device) if run is None else run[:context]
            self.sums[i] += _weights(self.shape, queries[i], self.pool.read_keys(heads.layer, slots))
        return result

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.plan.write(layer, k, v)

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.plan.written(layer)


def _weights(shape: AttentionShape, query: Tensor, keys: Tensor) -> Tensor:
    """query [heads, head_dim], keys [L, kv_heads, head_dim] -> the sum of its heads' weights on each, [L] float32."""
    grouped = query.float().view(keys.shape[1], -1, query.shape[-1])
    scores = grouped @ keys.float().permute(1, 2, 0)
    scores *= query.shape[-1] ** -0.5 if shape.scale is None else shape.scale
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    return scores.softmax(-1).sum((0, 1))
