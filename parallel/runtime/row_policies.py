"""Which rows of a long text a draft model keeps or sees: the newest behind some first ones, or chunks that matter.

`StreamingRows` frees rows and moves those behind to the positions of their indices, so that a model never sees a
position beyond its window (StreamingLLM, arXiv 2309.17453; TriForce, arXiv 2404.11912, section 4.2). A stored key is
rotated already, and rotations add up: one multiplication moves it. `RecentRows` and `ChunkRows` free nothing:
passes see a part of the rows, at the positions of the text. Chunks are those that the newest row attends to most, over
all heads and layers (TriForce, section 4.1, scores the mean key of each chunk, for each head; the sum of attention
weights does not blur a single key among others). Knows no drafts and no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
            keys, _ = self._pool.read(kv_layer, rows)
            self._pool.write_keys(kv_layer, rows, rotate(keys, turn))


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
    """Indices of the rows that were chosen when there were `context` rows."""

    context: int
    rows: np.ndarray


class ChunkRows(PartialRows):
    """Passes that ask for logits see the chosen chunks and the rows since; once in a while one sees all, and chooses.

    All ranks choose the same: weights are summed over them.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, limits: ChunkLimits) -> None:
        self._decoder = decoder
        self._pool = pool
        self._limits = limits
        self._chosen: dict[SeqId, _ChosenChunks] = {}
        self._due: list[SpanRows] = []
        self._watched: AttentionWeights | None = None

    def narrowed(self, rows: SpanRows, span: Span) -> SpanRows:
        self._choose()
        if not span.num_logits or rows.context <= self._limits.size * self._limits.num_chunks:
            return rows
        chosen = self._chosen.get(rows.seq_id)
        # rows of drafts may have been taken back since
        is_stale = chosen is None or abs(rows.context - chosen.context) >= self._limits.every
        if is_stale and not rows.first_pending:
            self._due.append(rows)
            return rows
        if chosen is None:
            return rows
        before = chosen.rows[chosen.rows < rows.context]
        return rows.seeing(np.concatenate((before, np.arange(chosen.context, rows.context))))

    def watch(self, plan: PassPlan) -> None:
        if self._due:
            due, self._due = self._due, []
            shape = self._decoder.attention_shape()
            self._watched = AttentionWeights(plan.attention, self._pool, shape, due)
            plan.attention = self._watched

    def forget(self, seq_id: SeqId) -> None:
        self._choose()
        self._chosen.pop(seq_id, None)

    def _choose(self) -> None:
        """Chooses by the weights of the pass that was watched last."""
        if self._watched is None:
            return
        for rows, weights in zip(self._watched.rows, self._watched.sums, strict=True):
            group = self._decoder.group
            summed = group.all_reduce(weights) if group.size > 1 else weights
            self._chosen[rows.seq_id] = _ChosenChunks(rows.context, self._best(summed.cpu().numpy()))
        self._watched = None

    def _best(self, weights: np.ndarray) -> np.ndarray:
        """Indices of the rows of the first chunk, of the newest ones, and of those with the largest sums of weights."""
        size, num_chunks = self._limits.size, self._limits.num_chunks
        sums = np.add.reduceat(weights, np.arange(0, len(weights), size))
        sums[0] = np.inf
        sums[len(sums) - max(1, num_chunks // RECENT) :] = np.inf
        chunks = np.sort(np.argsort(-sums, kind="stable")[:num_chunks])
        rows = (chunks[:, None] * size + np.arange(size)).reshape(-1)
        return rows[rows < len(weights)]


@dataclass(slots=True)
class AttentionWeights:
    """An attention plan that also sums up, over heads and layers, the weights of the last row of each of `rows` on its
    sequence's committed rows, float32 [context] each."""

    plan: AttentionPlan
    pool: KVPool
    shape: AttentionShape
    rows: Sequence[SpanRows]
    bucketed: bool = False  # no captured pass
    sums: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = self.pool.keys.device
        self.sums = [torch.zeros(rows.context, device=device) for rows in self.rows]
        self.rows = [_with_slots_of_its_own(rows) for rows in self.rows]

    def prepare(self) -> None:
        self.plan.prepare()

    def attend(self, heads: Heads, projected: Tensor, rotation: Rotation | None) -> Tensor:
        last = upload([rows.first + rows.num_rows - 1 for rows in self.rows], projected.device)
        turned = rotation and (rotation[0].index_select(0, last), rotation[1].index_select(0, last))
        queries, _, _ = heads.split(projected.index_select(0, last), turned)
        result = self.plan.attend(heads, projected, rotation)
        for i, rows in enumerate(self.rows):
            keys, _ = self.pool.read(heads.layer, upload(rows.slots[: rows.context], projected.device))
            self.sums[i] += _weights(self.shape, queries[i], keys)
        return result

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.plan.write(layer, k, v)

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.plan.written(layer)


def _with_slots_of_its_own(rows: SpanRows) -> SpanRows:
    """The rows with a copy of their slots, which the next change of the table does not reach."""
    return rows.seeing(np.arange(rows.context))


def _weights(shape: AttentionShape, query: Tensor, keys: Tensor) -> Tensor:
    """query [heads, head_dim], keys [L, kv_heads, head_dim] -> the sum of its heads' weights on each, [L] float32."""
    grouped = query.float().view(keys.shape[1], -1, query.shape[-1])
    scores = grouped @ keys.float().permute(1, 2, 0) * (query.shape[-1] ** -0.5 if shape.scale is None else shape.scale)
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    return scores.softmax(-1).sum((0, 1))
