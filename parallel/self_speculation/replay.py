"""Reads committed tokens of a sequence once more, with some of the target's layers or one sublayer after the other.

The rows read again borrow those before them and have slots of their own, which go back at the end: the target's rows
stay as they are. That shows what another choice of layers would have said of text that is there, and what every
sublayer does to it. Knows no tokens and no choice of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.kv.pool import SeqId
from parallel.kv.sequences import PooledSequences
from parallel.model.decoder import Decoder
from parallel.model.layer_plan import LayerPlan
from parallel.model.layers.attention import PassPlan
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.self_speculation.runner import RowsBehind
from parallel.transfers import upload


class ReplayedRows:
    """Rows of one pass; valid within `Replay.rows`."""

    def __init__(self, decoder: Decoder, plan: PassPlan) -> None:
        self.decoder = decoder
        self._plan = plan

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """The stream that enters the first layer, [T, H]."""
        tokens = upload(token_ids, self.decoder.device)
        return self.decoder.embed(tokens, self._plan.positions[: len(tokens)])

    @torch.inference_mode()
    def run(self, hidden: Tensor, layers: LayerPlan) -> Tensor:
        """The stream [T, H] after these sublayers."""
        padding = len(self._plan.positions) - len(hidden)
        padded = F.pad(hidden, (0, 0, 0, padding)) if padding else hidden
        return self.decoder.run_layers(padded, self._plan, layers)[0][: len(hidden)]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits by the target's norm and head, [T, V] float32."""
        return self.decoder.head(self.decoder.normalize(hidden)).float()


class Replay:
    """Passes over rows of `target` that leave them as they are."""

    def __init__(self, target: DecoderRunner) -> None:
        self.decoder = target.decoder
        self._target = target
        self._sequences = PooledSequences(target.pool)

    def can_read(self, num_rows: int) -> bool:
        """Whether the pool has slots for so many rows."""
        return self._target.can_reserve(num_rows)

    @contextmanager
    def rows(
        self, seq_id: SeqId, first: int, num_rows: int, parents: Sequence[int] | None = None
    ) -> Iterator[ReplayedRows]:
        """Rows after the sequence's first `first` committed ones: a chain, or by `parents` as in `Span`."""
        replayed = RowsBehind(seq_id, id(self))
        self._sequences.borrow(replayed, seq_id)
        try:
            self._sequences.truncate(replayed, first)
            rows = self._sequences.lay_out([Span(replayed, num_rows, parents, 0)])
            yield ReplayedRows(self.decoder, self._target.plan_rows(rows, []))
        finally:
            self._sequences.close(replayed)
