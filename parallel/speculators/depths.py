"""Drafts of several depths from one pass: what blocks, masks and heads beside the target's last layer have in common.

The pass over the root of a draft, the newest token of the text, gives the logits of all depths behind it. So draft
tokens have no rows of their own: a node has those of its depth below its root. Rows of the pool are those of committed
text whose features are known; what else a pass adds is given back at once. Knows no family.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel.kv.pass_plan import PendingRows, Span, lay_out, logit_rows
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text
from parallel.model.block import attention_heads
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.backends import default_backend, make_backend
from parallel.runtime.interface import PassOutput
from parallel.runtime.recorded_passes import RecordedPasses
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.runner import SpeculatorRunner
from parallel.transfers import upload


@dataclass(frozen=True, slots=True, eq=False)
class DepthsPass:
    """What a pass computed for all its roots: `rows` of their depths, root by root, of which the first are logits
    unless a family computes these from them, and the hidden states if a confidence head reads them."""

    rows: tuple[Tensor, ...]
    hidden: Tensor | None = None


@dataclass(slots=True)
class DepthNode:
    """A pending or the last committed row: `depth` below its root, whose first depth is at `first` of the pass."""

    made: DepthsPass
    first: int
    depth: int
    parent: DepthNode | None = None
    state: Tensor | None = None


@dataclass(slots=True)
class _Sequence:
    """`nodes` are the pending rows, None for text, after `last`, the last committed one; `length` counts the committed
    rows as the drafter does: draft tokens and the root are among them until `drop_fuzzy`."""

    length: int
    last: DepthNode | None = None
    nodes: list[DepthNode | None] = field(default_factory=list)


class DepthsRunner(SpeculatorRunner):
    """A node deeper than `longest_draft` has logits of minus infinity. A family implements `_start`."""

    first_row_token = 0
    """The pool's row r is that of token r + this; tokens before it have no rows."""

    def __init__(self, layers: Any, place: SpeculatorPlace, *, backend: str | None = None) -> None:
        super().__init__(layers.config, place.tables)
        self.layers = layers
        self.pool, shape = place.make_pool(layers.config.block)
        self._backend = make_backend(backend or default_backend(self.pool), self.pool, shape, layers)
        self._passes = RecordedPasses(self._backend, place.group, [layers.rope], attention_heads([layers]))
        self._sequences: dict[SeqId, _Sequence] = {}

    @property
    def rows_beside(self) -> int:
        """Rows that a pass adds to a sequence and gives back, at most."""
        return 0

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:  # noqa: ARG002
        super().open(seq_id)
        self.pool.open(seq_id)
        self._sequences[seq_id] = _Sequence(self.first_row_token)

    def close(self, seq_id: SeqId) -> None:
        super().close(seq_id)
        self.pool.close(seq_id)
        del self._sequences[seq_id]

    def cached_len(self, seq_id: SeqId) -> int:
        return self._sequences[seq_id].length

    def can_reserve(self, num_rows: int) -> bool:
        """Every open sequence may have a root in the pass."""
        return self.pool.can_reserve(num_rows + self.rows_beside * len(self._sequences))

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        sequence = self._sequences[seq_id]
        if keep:
            sequence.last = sequence.nodes[keep[-1]]
        sequence.length += len(keep)
        sequence.nodes = [sequence.nodes[row] for row in retain]

    def truncate(self, seq_id: SeqId, length: int) -> None:
        self._sequences[seq_id] = _Sequence(max(self.first_row_token, length))
        num_rows = max(0, length - self.first_row_token)
        if num_rows < self.pool.cached_len(seq_id):
            self.pool.truncate(seq_id, num_rows)

    def drop_fuzzy(self, seq_id: SeqId) -> bool:
        """All rows without the target's features, and so every node."""
        num_rows = self.pool.cached_len(seq_id)
        self._features[seq_id].forget(num_rows - self.first_row_token)
        known = num_rows + self.first_row_token
        if self._sequences[seq_id].length <= known:
            return False
        self._sequences[seq_id] = _Sequence(known)
        return True

    def _forward(self, spans: Sequence[Span], token_ids: Tensor, *, fuzzy: bool) -> PassOutput:
        """Runs one pass. In a span of an exact pass that asks for logits, the first row that has them is the root, and
        those after it are draft tokens; a fuzzy pass feeds draft tokens alone."""
        roots = {} if fuzzy else self._start(spans, token_ids)
        nodes, rows, first = list[DepthNode](), list[int](), 0
        for span in spans:
            added = self._append(span, roots.get(span.seq_id), fuzzy=fuzzy)
            nodes += added[len(added) - span.num_logits :]
            rows += range(first + span.num_tokens - span.num_logits, first + span.num_tokens)
            first += span.num_tokens
        if len(rows) < len(token_ids):
            token_ids = token_ids[upload(rows, token_ids.device)]
        logits = self._logits(nodes, token_ids)
        return PassOutput(logits, logits.new_empty(0, 0), (), self._acceptance(nodes, token_ids))

    @abstractmethod
    def _start(self, spans: Sequence[Span], token_ids: Tensor) -> dict[SeqId, DepthNode]:
        """Write the rows of the text; returns the roots, of the spans that ask for logits."""

    def _append(self, span: Span, root: DepthNode | None, *, fuzzy: bool) -> list[DepthNode]:
        """Make the span's rows pending; returns its nodes."""
        sequence, added = self._sequences[span.seq_id], list[DepthNode]()
        pending = sequence.nodes
        num_text = 0 if fuzzy else span.num_text
        for i in range(span.num_tokens):
            parent = len(pending) - 1 if span.parents is None else span.parents[i]
            if i < num_text:
                node = root if i == num_text - 1 else None
            else:
                above = pending[parent] if parent >= 0 else sequence.last
                assert above is not None, "a draft token follows a root"
                node = DepthNode(above.made, above.first, above.depth + 1, above)
            pending.append(node)
            if node is not None:
                added.append(node)
        return added

    def _logits(self, nodes: Sequence[DepthNode], token_ids: Tensor) -> Tensor:
        """Logits [n, V] at the nodes, those of a group at once."""
        groups = self._groups(nodes)
        parts = [self._read([nodes[i] for i in places], token_ids, places) for places in groups]
        if len(parts) == 1 and len(parts[0]) == len(nodes):
            return parts[0]
        logits = torch.full((len(nodes), self.speculator.num_logits), -torch.inf, device=token_ids.device)
        for part, places in zip(parts, groups, strict=True):
            logits.index_copy_(0, upload(places, logits.device), part)
        return logits

    def _groups(self, nodes: Sequence[DepthNode]) -> list[list[int]]:
        """Places of the nodes that have logits, in the order in which these are computed."""
        speaking = [i for i, node in enumerate(nodes) if node.depth < self.longest_draft]
        return [speaking] if speaking else []

    def _read(self, nodes: Sequence[DepthNode], token_ids: Tensor, places: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Logits [n, V] of some nodes, whose tokens are at these places."""
        return known_rows(nodes)[0]

    def _acceptance(self, nodes: Sequence[DepthNode], token_ids: Tensor) -> Tensor | None:  # noqa: ARG002
        """What a confidence head predicts of the tokens drawn at the nodes, [n]; None without one."""
        return None


class LaterRowsRunner(DepthsRunner):
    """The pool's row r is that of token r + 1 of the text, and is made of the features before that token."""

    first_row_token = 1

    def cached_len(self, seq_id: SeqId) -> int:
        """Accepted draft tokens have no row and are fed again as text."""
        return self.pool.cached_len(seq_id) + 1

    def _known_rows(self, seq_id: SeqId, row: int, count: int) -> Tensor:
        """The features that so many rows from `row` on are made of."""
        known = self._features[seq_id]
        assert row + count <= known.end, f"token {row + count} was fed, features end at {known.end}"
        return known.rows(range(row, row + count))

    def _run_text(
        self, spans: Sequence[Span], fed: Sequence[Span], run: Callable[[PassPlan], Tensor]
    ) -> dict[SeqId, DepthNode]:
        """The rows of the text of `spans`, and what `fed` has behind them, which is given back; the roots. `run` makes
        the pass and gives the logits of all depths of each root, [roots * depths, V]."""
        forests = {span.seq_id: PendingRows() for span in fed}
        plan = self._backend.plan(lay_out(self.pool, forests, fed), logit_rows(fed))
        made = DepthsPass((run(plan).float(),))
        for span in spans:
            self.pool.commit(span.seq_id, range(span.num_text))
        started = [span.seq_id for span in spans if span.num_logits]
        return {seq_id: DepthNode(made, i * self.longest_draft, 0) for i, seq_id in enumerate(started)}


def known_rows(nodes: Sequence[DepthNode]) -> tuple[Tensor, ...]:
    """What is known of the nodes' depths; it may be of several passes."""
    runs: list[tuple[DepthsPass, list[int]]] = []
    for node in nodes:
        if not runs or runs[-1][0] is not node.made:
            runs.append((node.made, []))
        runs[-1][1].append(node.first + node.depth)
    parts = []
    for made, rows in runs:
        if len(rows) == 1:
            parts.append(tuple(tensor[rows[0] : rows[0] + 1] for tensor in made.rows))
        else:
            where = upload(rows, made.rows[0].device)
            parts.append(tuple(tensor.index_select(0, where) for tensor in made.rows))
    return parts[0] if len(parts) == 1 else tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
