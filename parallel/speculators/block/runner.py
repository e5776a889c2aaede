"""Block drafters: one pass drafts a block of positions whose keys include the target's hidden states of all the text.

In every layer the keys and values of the committed text are projections of one vector per position, the normalised
product of the target's taps; it is no sequence that the layers update. The block [token n, MASK, MASK, ...] stands at
positions n, n+1, ..., its rows see the text before n and each other, and are not kept. The logits at the root and at
every draft token are those of the block's position at their depth: after the pass a draft token costs a look-up, or a
step of a small corrector (`correctors.py`).

DFlash (arXiv 2602.06036); DSpark (2607.05147): the position of token n predicts too, a corrector, a confidence; DFlash
2: convolutions over the block and a selector; Domino (2605.29707). Knows no requests and no rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel.kv.pass_plan import MutualRows, Span, SpanRows
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text
from parallel.model.block import attention_heads
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.backends import default_backend, make_backend
from parallel.runtime.interface import PassOutput
from parallel.runtime.recorded_passes import RecordedPasses
from parallel.speculators.block.config import BlockConfig
from parallel.speculators.block.correctors import PositionRows
from parallel.speculators.block.layers import MASK, BlockLayers, embedding_of
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.runner import SpeculatorRunner
from parallel.transfers import to_device, upload


@dataclass(frozen=True, slots=True, eq=False)
class BlockPass:
    """What a pass computed for all its blocks: `rows` of their positions, block by block, and their hidden states if a
    confidence head reads them."""

    rows: PositionRows
    hidden: Tensor | None = None


@dataclass(slots=True)
class BlockNode:
    """A pending or the last committed row: `depth` below its block's root, `first` the block's first position."""

    blocks: BlockPass
    first: int
    depth: int
    parent: BlockNode | None = None
    state: Tensor | None = None


class _Sequence:
    """`nodes` are the pending rows, None for text, after `last`, the last committed one; `length` counts the committed
    rows as the drafter does: draft tokens and the root are among them until `drop_fuzzy`."""

    def __init__(self) -> None:
        self.length = 0
        self.last: BlockNode | None = None
        self.nodes: list[BlockNode | None] = []


class BlockRunner(SpeculatorRunner):
    """Rows of the pool are those of committed text whose features are known; a block's are given back at once.

    A node deeper than the block has logits of minus infinity.
    """

    speculator: BlockConfig
    layers: BlockLayers

    def __init__(
        self,
        layers: Any,  # `layers`, which a family has of its own
        place: SpeculatorPlace,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__(layers.config, place.tables)
        self.layers = layers
        self.pool, shape = place.make_pool(layers.config.block)
        self._backend = make_backend(backend or default_backend(self.pool), self.pool, shape, layers)
        self._passes = RecordedPasses(self._backend, place.group, [layers.rope], attention_heads([layers]))
        self._sequences: dict[SeqId, _Sequence] = {}

    @property
    def longest_draft(self) -> int:
        return self.speculator.num_drafted

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:  # noqa: ARG002
        super().open(seq_id)
        self.pool.open(seq_id)
        self._sequences[seq_id] = _Sequence()

    def close(self, seq_id: SeqId) -> None:
        super().close(seq_id)
        self.pool.close(seq_id)
        del self._sequences[seq_id]

    def cached_len(self, seq_id: SeqId) -> int:
        return self._sequences[seq_id].length

    def can_reserve(self, num_rows: int) -> bool:
        """Every open sequence may have a block in the pass."""
        return self.pool.can_reserve(num_rows + self.speculator.block_size * len(self._sequences))

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        sequence = self._sequences[seq_id]
        if keep:
            sequence.last = sequence.nodes[keep[-1]]
        sequence.length += len(keep)
        sequence.nodes = [sequence.nodes[row] for row in retain]

    def truncate(self, seq_id: SeqId, length: int) -> None:
        sequence = self._sequences[seq_id]
        sequence.length, sequence.last, sequence.nodes = length, None, []
        if length < self.pool.cached_len(seq_id):
            self.pool.truncate(seq_id, length)

    def drop_fuzzy(self, seq_id: SeqId) -> bool:
        """All rows without the target's features, and so every block."""
        sequence, known = self._sequences[seq_id], self.pool.cached_len(seq_id)
        if sequence.length <= known:
            return False
        sequence.length, sequence.last, sequence.nodes = known, None, []
        return True

    def _forward(self, spans: Sequence[Span], token_ids: Tensor, *, fuzzy: bool) -> PassOutput:
        """Runs one pass. In a span of an exact pass that asks for logits, the first row that has them is the root, and
        those after it are draft tokens; a fuzzy pass feeds draft tokens alone."""
        roots: dict[SeqId, BlockNode] = {}
        if not fuzzy:
            roots = self._start_blocks(spans, token_ids)
        nodes, rows, first = list[BlockNode](), list[int](), 0
        for span in spans:
            added = self._append(span, roots.get(span.seq_id), fuzzy=fuzzy)
            nodes += added[len(added) - span.num_logits :]
            rows += range(first + span.num_tokens - span.num_logits, first + span.num_tokens)
            first += span.num_tokens
        if len(rows) < len(token_ids):
            token_ids = token_ids[upload(rows, token_ids.device)]
        logits = self._logits(nodes, token_ids)
        return PassOutput(logits, logits.new_empty(0, 0), (), self._acceptance(nodes, token_ids))

    def _append(self, span: Span, root: BlockNode | None, *, fuzzy: bool) -> list[BlockNode]:
        """Make the span's rows pending; returns its nodes."""
        sequence, added = self._sequences[span.seq_id], list[BlockNode]()
        pending = sequence.nodes
        num_text = 0 if fuzzy else span.num_text
        for i in range(span.num_tokens):
            parent = len(pending) - 1 if span.parents is None else span.parents[i]
            if i < num_text:
                node = root if i == num_text - 1 else None
            else:
                above = pending[parent] if parent >= 0 else sequence.last
                assert above is not None, "a draft token follows the root of a block"
                node = BlockNode(above.blocks, above.first, above.depth + 1, above)
            pending.append(node)
            if node is not None:
                added.append(node)
        return added

    # --- passes -------------------------------------------------------------------------------------------------------

    def _start_blocks(self, spans: Sequence[Span], token_ids: Tensor) -> dict[SeqId, BlockNode]:
        """Write the rows of the text and run a block from every root."""
        texts, anchors, first = list[tuple[SeqId, int]](), list[int](), 0
        for span in spans:
            sequence = self._sequences[span.seq_id]
            length = sequence.length + len(sequence.nodes) + span.num_tokens - span.num_logits
            texts.append((span.seq_id, length))
            anchors.append(first + span.num_tokens - span.num_logits)
            first += span.num_tokens
        self._write_text(texts)
        started = [(span.seq_id, row) for span, row in zip(spans, anchors, strict=True) if span.num_logits]
        if not started:
            return {}
        config, size = self.speculator, self.speculator.block_size
        mask = MASK if config.mask_token_id is None else config.mask_token_id
        device = token_ids.device
        block_ids = torch.full((len(started), size), mask, dtype=torch.int64, device=device)
        block_ids[:, 0] = token_ids[upload([row for _, row in started], device)]
        plan = self._plan([seq_id for seq_id, _ in started])
        (hidden,) = self._passes.compute(self.layers.rows, plan, [self.layers.enter(block_ids.view(-1))])
        hidden = hidden[: len(started) * size]
        for seq_id, _ in started:
            self.pool.truncate(seq_id, self.pool.cached_len(seq_id))
        hidden = hidden.view(len(started), size, -1)[:, size - config.num_drafted :].flatten(0, 1)
        logits, corrector = self.layers.head(hidden, self.decoder), self.layers.corrector
        rows = (logits,) if corrector is None else corrector.cell.prepare(corrector, logits, hidden)
        blocks = BlockPass(rows, None if self.layers.confidence is None else hidden)
        return {seq_id: BlockNode(blocks, i * config.num_drafted, 0) for i, (seq_id, _) in enumerate(started)}

    def _write_text(self, texts: Sequence[tuple[SeqId, int]]) -> None:
        """Keys and values of every sequence's text up to a length, as far as they are missing."""
        features, positions, slots = list[Tensor](), list[int](), list[np.ndarray]()
        for seq_id, length in texts:
            known = self._features[seq_id]
            missing = range(self.pool.cached_len(seq_id), length)
            assert length <= known.end, f"position {length - 1} was fed, features are known up to {known.end}"
            if missing:
                features.append(known.rows(missing))
                known.forget(length)
                positions += missing
                slots.append(self.pool.reserve(seq_id, len(missing)).copy())
                self.pool.commit(seq_id, range(len(missing)))
        if not positions:
            return
        device = self.layers.device
        rows = (features[0] if len(features) == 1 else torch.cat(features)).to(device, self.pool.dtype)
        places, where = to_device([np.array(positions), np.concatenate(slots)], device)
        keys, values = self.layers.context(rows, places)
        self.pool.keys.index_copy_(1, where, keys)
        self.pool.values.index_copy_(1, where, values)

    def _plan(self, seq_ids: Sequence[SeqId]) -> PassPlan:
        """Reserve a block for each of these sequences, and plan the pass over all their rows."""
        size, laid_out = self.speculator.block_size, list[SpanRows]()
        for i, seq_id in enumerate(seq_ids):
            context = self.pool.cached_len(seq_id)
            self.pool.reserve(seq_id, size)
            slots, run = self.pool.slots(seq_id), self.pool.run(seq_id)
            laid_out.append(SpanRows(seq_id, i * size, size, context, size, slots, run, MutualRows(size)))
        return self._backend.plan(laid_out, list(range(size * len(seq_ids))))

    def _logits(self, nodes: Sequence[BlockNode], token_ids: Tensor) -> Tensor:
        """Logits [n, V] at the nodes, and their states, level by level where a child needs its parent's."""
        levels: dict[int, list[int]] = {}
        for i, node in enumerate(nodes):
            if node.depth < self.speculator.num_drafted:
                levels.setdefault(node.depth if self.layers.corrector is not None else 0, []).append(i)
        parts = [self._level([nodes[i] for i in places], token_ids, places) for _, places in sorted(levels.items())]
        if len(parts) == 1 and len(parts[0]) == len(nodes):
            return parts[0]
        logits = torch.full((len(nodes), self.speculator.num_logits), -torch.inf, device=token_ids.device)
        for part, places in zip(parts, (places for _, places in sorted(levels.items())), strict=True):
            logits.index_copy_(0, upload(places, logits.device), part)
        return logits

    def _level(self, nodes: Sequence[BlockNode], token_ids: Tensor, places: Sequence[int]) -> Tensor:
        """Nodes of one depth where there is a corrector."""
        rows, corrector, depth = _gather(nodes), self.layers.corrector, nodes[0].depth
        if corrector is None:
            return rows[0]
        if len(places) < len(token_ids):
            token_ids = token_ids[upload(places, token_ids.device)]
        keeps_state = corrector.cell.shapes.state_size > 0
        state = torch.stack([_parent_state(node) for node in nodes]) if keeps_state and depth else None
        logits, state = corrector.cell.step(corrector, rows, token_ids, state)
        if state is not None:
            for node, own in zip(nodes, state, strict=True):
                node.state = own
        return logits

    def _acceptance(self, nodes: Sequence[BlockNode], token_ids: Tensor) -> Tensor | None:
        """What the confidence head predicts of the tokens drawn at the nodes, [n]; 0 below the block."""
        layers, longest = self.layers, self.speculator.num_drafted
        if layers.confidence is None or not nodes:
            return None
        read = torch.cat([_hidden(node, longest) for node in nodes])
        if layers.corrector is not None:
            read = layers.corrector.cell.with_token(layers.corrector, read, token_ids)
        chances = layers.confidence(read)[:, 0].float().sigmoid()
        if all(node.depth < longest for node in nodes):
            return chances
        return chances * upload([node.depth < longest for node in nodes], chances.device, np.float32)


class LaterRowsRunner(BlockRunner):
    """The pool's row r is that of token r + 1 of the text, and is made of the features before that token."""

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:  # noqa: ARG002
        super().open(seq_id)
        self._sequences[seq_id].length = 1  # token 0, which has no row

    def cached_len(self, seq_id: SeqId) -> int:
        """Accepted draft tokens have no row and are fed again as text."""
        return self.pool.cached_len(seq_id) + 1

    def truncate(self, seq_id: SeqId, length: int) -> None:
        sequence = self._sequences[seq_id]
        sequence.length, sequence.last, sequence.nodes = max(1, length), None, []
        if length - 1 < self.pool.cached_len(seq_id):
            self.pool.truncate(seq_id, max(0, length - 1))

    def drop_fuzzy(self, seq_id: SeqId) -> bool:
        self._features[seq_id].forget(self.pool.cached_len(seq_id) - 1)
        sequence, known = self._sequences[seq_id], self.cached_len(seq_id)
        if sequence.length <= known:
            return False
        sequence.length, sequence.last, sequence.nodes = known, None, []
        return True

    def _known_rows(self, seq_id: SeqId, row: int, count: int) -> Tensor:
        """The features that so many rows from `row` on are made of."""
        known = self._features[seq_id]
        assert row + count <= known.end, f"token {row + count} was fed, features end at {known.end}"
        return known.rows(range(row, row + count))


def _hidden(node: BlockNode, longest: int) -> Tensor:
    """The state at the node's position, or at its block's last one, [1, H]."""
    assert node.blocks.hidden is not None
    row = node.first + min(node.depth, longest - 1)
    return node.blocks.hidden[row : row + 1]


def _parent_state(node: BlockNode) -> Tensor:
    state = None if node.parent is None else node.parent.state
    assert state is not None, "a node was fed before its parent"
    return state


def _gather(nodes: Sequence[BlockNode]) -> PositionRows:
    """What is known of the nodes' positions; their blocks may be of several passes."""
    runs: list[tuple[BlockPass, list[int]]] = []
    for node in nodes:
        if not runs or runs[-1][0] is not node.blocks:
            runs.append((node.blocks, []))
        runs[-1][1].append(node.first + node.depth)
    parts = []
    for blocks, rows in runs:
        if len(rows) == 1:
            parts.append(tuple(tensor[rows[0] : rows[0] + 1] for tensor in blocks.rows))
        else:
            where = upload(rows, blocks.rows[0].device)
            parts.append(tuple(tensor.index_select(0, where) for tensor in blocks.rows))
    return parts[0] if len(parts) == 1 else tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def open_runner(directory: Path, config: BlockConfig, place: SpeculatorPlace) -> BlockRunner:
    """Load the layers beside their target."""
    given = {"embed": embedding_of(config, place.tables), "reads_fused": place.reads_fused}
    return BlockRunner(BlockLayers.opened(directory, config, place, **given), place)
