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
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parallel.kv.pass_plan import MutualRows, Span, SpanRows
from parallel.kv.pool import SeqId
from parallel.model.layers.attention import PassPlan
from parallel.speculators.block.config import BlockConfig
from parallel.speculators.block.layers import MASK, BlockLayers, embedding_of
from parallel.speculators.depths import DepthNode, DepthsPass, DepthsRunner, known_rows
from parallel.speculators.place import SpeculatorPlace
from parallel.transfers import to_device, upload


class BlockRunner(DepthsRunner):
    """A root's pass is that of its block, whose rows are given back."""

    speculator: BlockConfig
    layers: BlockLayers

    @property
    def longest_draft(self) -> int:
        return self.speculator.num_drafted

    @property
    def rows_beside(self) -> int:
        return self.speculator.block_size

    # --- passes -------------------------------------------------------------------------------------------------------

    def _start(self, spans: Sequence[Span], token_ids: Tensor) -> dict[SeqId, DepthNode]:
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
        made = DepthsPass(rows, None if self.layers.confidence is None else hidden)
        return {seq_id: DepthNode(made, i * config.num_drafted, 0) for i, (seq_id, _) in enumerate(started)}

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

    # --- correctors ---------------------------------------------------------------------------------------------------

    def _groups(self, nodes: Sequence[DepthNode]) -> list[list[int]]:
        """Level by level where a corrector needs the state of a node's parent."""
        if self.layers.corrector is None:
            return super()._groups(nodes)
        levels: dict[int, list[int]] = {}
        for i, node in enumerate(nodes):
            if node.depth < self.longest_draft:
                levels.setdefault(node.depth, []).append(i)
        return [places for _, places in sorted(levels.items())]

    def _read(self, nodes: Sequence[DepthNode], token_ids: Tensor, places: Sequence[int]) -> Tensor:
        """Nodes of one depth, and their states, where there is a corrector."""
        corrector = self.layers.corrector
        if corrector is None:
            return super()._read(nodes, token_ids, places)
        if len(places) < len(token_ids):
            token_ids = token_ids[upload(places, token_ids.device)]
        keeps_state = corrector.cell.shapes.state_size > 0
        state = torch.stack([_parent_state(node) for node in nodes]) if keeps_state and nodes[0].depth else None
        logits, state = corrector.cell.step(corrector, known_rows(nodes), token_ids, state)
        if state is not None:
            for node, own in zip(nodes, state, strict=True):
                node.state = own
        return logits

    def _acceptance(self, nodes: Sequence[DepthNode], token_ids: Tensor) -> Tensor | None:
        """Tokens below the block have a chance of 0."""
        layers, longest = self.layers, self.longest_draft
        if layers.confidence is None or not nodes:
            return None
        read = torch.cat([_hidden(node, longest) for node in nodes])
        if layers.corrector is not None:
            read = layers.corrector.cell.with_token(layers.corrector, read, token_ids)
        chances = layers.confidence(read)[:, 0].float().sigmoid()
        if all(node.depth < longest for node in nodes):
            return chances
        return chances * upload([node.depth < longest for node in nodes], chances.device, np.float32)


def _hidden(node: DepthNode, longest: int) -> Tensor:
    """The state at the node's position, or at its block's last one, [1, H]."""
    assert node.made.hidden is not None
    row = node.first + min(node.depth, longest - 1)
    return node.made.hidden[row : row + 1]


def _parent_state(node: DepthNode) -> Tensor:
    state = None if node.parent is None else node.parent.state
    assert state is not None, "a node was fed before its parent"
    return state


def open_runner(directory: Path, config: BlockConfig, place: SpeculatorPlace) -> BlockRunner:
    """Load the layers beside their target."""
    given = {"embed": embedding_of(config, place.tables), "reads_fused": place.reads_fused}
    return BlockRunner(BlockLayers.opened(directory, config, place, **given), place)
