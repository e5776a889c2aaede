"""Chimera (arXiv 2402.15758): one decoder layer over the target's hidden states of the text and trigrams behind it.

The row of a token whose features are known is the target's last hidden state; the row of any other is made of the
embeddings of the last three tokens, so that draft rows wait for no earlier output, and is fuzzy: once the features are
there, the row is computed again from them. The head reads the newest known hidden state beside the layer's output.

Other than the paper's, whose head multiplies that pair by a matrix of its own, a projection of the pair, which begins
as the average, is read by the target's head: it needs 2 H^2 numbers instead of 2 H V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.comm.group import SINGLE, Group
from parallel.kv.pass_plan import PendingRows, Span
from parallel.kv.pool import SeqId
from parallel.model.block import Block
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.norm import RMSNorm
from parallel.model.layers.weight import Shard, TensorOptions
from parallel.speculators.chimera.layouts import TRIGRAM, ChimeraConfig
from parallel.speculators.fusing import WholeRowsLinear
from parallel.speculators.own_layers import OwnLayers
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.runner import PooledRunner
from parallel.transfers import upload


class ChimeraLayers(OwnLayers):
    def __init__(self, config: ChimeraConfig, group: Group = SINGLE, **options: Unpack[TensorOptions]) -> None:
        super().__init__(config, group, **options)
        block, hidden = config.block, config.block.hidden_size
        wide = TRIGRAM * hidden
        self.mix = WholeRowsLinear("", wide, wide, group, bias=True, **options)
        self.narrow = WholeRowsLinear("", wide, hidden, group, bias=False, **options)
        self.layer = Block(block, 0, 0, group, group, **options)
        self.norm = RMSNorm(hidden, block.norm_eps, **options)
        self.join = WholeRowsLinear("", 2 * hidden, hidden, group, bias=False, **options)

    def trigrams(self, x: Tensor) -> Tensor:
        """The embeddings of three tokens, the newest last, [T, 3 H] -> [T, H]."""
        return self.narrow(x + F.silu(self.mix(x)))

    def forward(self, rows: Tensor, plan: PassPlan) -> Tensor:
        """[T, H] -> what the layer expects of the target's final hidden states there, [T, H]."""
        plan.attention.prepare()
        return self.norm(self.layer(rows, self.rope(plan.positions), plan.attention))

    def read(self, known: Tensor, expected: Tensor) -> Tensor:
        """The newest known hidden states and the expected ones, [N, H] each -> what the target's head reads."""
        return self.join(torch.cat((known, expected), 1))

    def shards(self) -> Iterator[Shard]:
        for name in ("mix", "narrow", "layer", "norm", "join"):
            yield from getattr(self, name).shards(name)


class ChimeraRunner(PooledRunner):
    """The pool's row r is that of token r."""

    speculator: ChimeraConfig

    def __init__(self, layers: ChimeraLayers, place: SpeculatorPlace, *, backend: str | None = None) -> None:
        super().__init__(layers, place, backend=backend)
        self.layers = layers
        self._tokens = torch.zeros(place.num_slots, dtype=torch.int64, device=place.device)  # by slot

    def _read(self, spans: Sequence[Span], token_ids: Tensor, *, fuzzy: bool) -> Tensor:
        plan = self._plan(spans)
        slots = np.concatenate([self.pool.slots(span.seq_id)[-span.num_tokens :] for span in spans])
        self._tokens.index_copy_(0, upload(slots, self._tokens.device), token_ids)
        hidden = self.layers.forward(self._rows(spans, fuzzy=fuzzy), plan)
        return plan.asked(hidden)

    def _head(self, spans: Sequence[Span], hidden: Tensor) -> Tensor:
        known = torch.cat([self._newest(span.seq_id).expand(span.num_logits, -1) for span in spans])
        return self.decoder.head(self.layers.read(known, hidden))

    def _rows(self, spans: Sequence[Span], *, fuzzy: bool) -> Tensor:
        """What the layer reads, [T, H]: known hidden states, or trigrams, whose rows are marked."""
        known: list[Tensor] = []
        text: list[int] = []  # rows of the pass
        drafted: list[int] = []
        trigrams: list[list[int]] = []  # slots
        first = 0
        for span in spans:
            pending, slots = self._pending[span.seq_id], self.pool.slots(span.seq_id)
            num_rows, start = self.pool.cached_len(span.seq_id), len(pending.parents) - span.num_tokens
            positions = self._feature_positions(span.seq_id, start, pending.parents[start:], fuzzy=fuzzy)
            for i, position in enumerate(positions):
                if position is not None:
                    text.append(first + i)
                else:
                    drafted.append(first + i)
                    trigrams.append([int(slots[place]) for place in _trigram(num_rows, pending, start + i)])
            self._is_fuzzy[slots[num_rows + start :]] = [position is None for position in positions]
            if of_text := [position for position in positions if position is not None]:
                known.append(self._features[span.seq_id].rows(of_text))
            first += span.num_tokens
        parts = [torch.cat(known).to(self.pool.keys.dtype)] if known else []
        if drafted:
            tokens = self._tokens[upload(np.array(trigrams), self._tokens.device)]
            embedded = self.decoder.embedding.embed(tokens.flatten()).view(len(tokens), -1)
            parts.append(self.layers.trigrams(embedded))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts).index_select(0, upload(np.argsort(text + drafted), self._tokens.device))

    def _newest(self, seq_id: SeqId) -> Tensor:
        """The newest known hidden state, [1, H]; zero before the first."""
        features = self._features[seq_id]
        if not features.end:
            return self.pool.keys.new_zeros(1, self.speculator.target_hidden)
        return features.rows([features.end - 1]).to(self.pool.keys.dtype)


def _trigram(num_rows: int, pending: PendingRows, row: int) -> list[int]:
    """Indices of a pending row's token and the two before it among the sequence's rows, the newest last."""
    path = [num_rows + row]
    for _ in range(TRIGRAM - 1):
        index = path[0]
        before = index - 1 if index < num_rows else num_rows + pending.parents[index - num_rows]
        path.insert(0, max(0, before))
    return path


def open_runner(directory: Path, config: ChimeraConfig, place: SpeculatorPlace) -> ChimeraRunner:
    """Load the layer beside its target."""
    return ChimeraRunner(ChimeraLayers.opened(directory, config, place), place)
