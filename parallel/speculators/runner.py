"""What every speculator shows to the drafter that uses it: the passes of a model whose text rows read the target.

The drafter feeds tokens and asks for logits, as of any draft model, so chains, trees, draft-ahead and every rule are
those of `drafter=model`. Rows of committed tokens are computed from the target's features; rows of draft tokens, for
which there are none yet, from the speculator's own state: these are fuzzy, and dropped once the target's features are
there. Knows sequences and rows, not requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from parallel.kv.pass_plan import Span, lay_out, logit_rows
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text
from parallel.kv.sequences import PooledSequences
from parallel.model.decoder import Decoder
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.backends import default_backend, make_backend
from parallel.runtime.interface import PassOutput, Runner
from parallel.self_speculation.runner import SelfDraftRunner
from parallel.speculators.config import SpeculatorConfig
from parallel.speculators.features import TextFeatures
from parallel.speculators.own_layers import OwnLayers
from parallel.speculators.place import SpeculatorPlace
from parallel.transfers import upload


class SpeculatorRunner(Runner):
    """`tables` is the target's own decoder, or one of no layers with its embedding and head (`open_tables`).

    A family keeps the rows: `cached_len`, `can_reserve`, `commit`, `truncate`, `drop_fuzzy`, and `_forward`, which may
    be asked for text only up to the first token whose predecessor has no features (`num_known`). One that drafts with
    the target's layers too sets `self_draft`.
    """

    self_draft: SelfDraftRunner | None = None
    kv_bytes = 0
    """Bytes of the rows that it keeps, where its record's `bytes_per_slot` does not say; else 0."""

    def __init__(self, config: SpeculatorConfig, tables: Decoder) -> None:
        self.speculator = config
        self.decoder = tables
        self._features: dict[SeqId, TextFeatures] = {}

    @property
    def config(self) -> SpeculatorConfig:
        return self.speculator

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:  # noqa: ARG002
        """Opens without known rows: they follow from the target's hidden states, which it is given for known rows
        too."""
        self._features[seq_id] = TextFeatures()

    def close(self, seq_id: SeqId) -> None:
        del self._features[seq_id]

    def read_features(self, seq_id: SeqId, start: int, rows: Tensor) -> None:
        """The target's features [n, `feature_size`] at the committed positions from `start` on, in order."""
        self._features[seq_id].append(start, rows)

    def num_known(self, seq_id: SeqId) -> int:
        """Leading positions of the text whose features were read."""
        return self._features[seq_id].end

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], taps: Sequence[int] = (), *, fuzzy: bool = False
    ) -> PassOutput:
        """Logits of the rows asked for; text is fed by passes that are not fuzzy."""
        assert not taps, "a speculator has no taps"
        return self._forward(spans, upload(token_ids, self.decoder.device), fuzzy=fuzzy)

    @abstractmethod
    def _forward(self, spans: Sequence[Span], token_ids: Tensor, *, fuzzy: bool) -> PassOutput: ...


class PooledRunner(SpeculatorRunner):
    """A speculator whose text rows and draft rows both stand in its pool, of `num_layers` or as many as its record has,
    trees of them pending until `commit`.

    A family implements `_read`, and `_head` where the logits need more than its rows. It marks fuzzy rows in
    `_is_fuzzy`, by slot, so that edits of slot tables need no update.
    """

    first_row_token = 0
    """The pool's row r is that of token r + this."""

    def __init__(
        self, layers: OwnLayers, place: SpeculatorPlace, num_layers: int | None = None, *, backend: str | None = None
    ) -> None:
        super().__init__(layers.config, place.tables)
        self.pool, shape = place.make_pool(layers.config.block, num_layers)
        self._sequences = PooledSequences(self.pool)
        self._pending = self._sequences.pending
        self._backend = make_backend(backend or default_backend(self.pool), self.pool, shape, layers)
        self._is_fuzzy = np.zeros(self.pool.num_slots, dtype=bool)

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:  # noqa: ARG002
        super().open(seq_id)
        self._sequences.open(seq_id)

    def close(self, seq_id: SeqId) -> None:
        super().close(seq_id)
        self._sequences.close(seq_id)

    def can_reserve(self, num_rows: int) -> bool:
        return self.pool.can_reserve(num_rows)

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        self._sequences.commit(seq_id, keep, retain)

    def cached_len(self, seq_id: SeqId) -> int:
        return self.pool.cached_len(seq_id) + self.first_row_token

    def truncate(self, seq_id: SeqId, length: int) -> None:
        self._sequences.truncate(seq_id, max(0, length - self.first_row_token))

    def drop_fuzzy(self, seq_id: SeqId) -> bool:
        features, num_rows = self._features[seq_id], self.pool.cached_len(seq_id)
        # rows whose features were forgotten are exact
        first = min(features.start, num_rows)
        marks = self._is_fuzzy[self.pool.slots(seq_id)[first:num_rows]]
        exact = first + int(marks.argmax()) if marks.any() else num_rows
        features.forget(exact - 1)  # the last row may be truncated and computed again; a head may read the newest
        if exact == num_rows:
            return False
        self.truncate(seq_id, exact + self.first_row_token)
        return True

    def _forward(self, spans: Sequence[Span], token_ids: Tensor, *, fuzzy: bool) -> PassOutput:
        """`hidden` of the output is what the head read of the rows asked for."""
        hidden = self._read(spans, token_ids, fuzzy=fuzzy)
        if not len(hidden):
            return PassOutput(hidden.new_empty(0, self.speculator.num_logits, dtype=torch.float32), hidden, ())
        return PassOutput(self._head(spans, hidden).float(), hidden, ())

    @abstractmethod
    def _read(self, spans: Sequence[Span], token_ids: Tensor, *, fuzzy: bool) -> Tensor:
        """Enter the rows of the spans; returns what the head reads of those whose logits are asked for, [N, H]."""

    def _plan(self, spans: Sequence[Span]) -> PassPlan:
        """Makes the spans' rows pending; returns the pass over them."""
        return self._backend.plan(lay_out(self.pool, self._pending, spans), logit_rows(spans))

    def _feature_positions(self, seq_id: SeqId, first: int, parents: Sequence[int], *, fuzzy: bool) -> list[int | None]:
        """Positions of the target's features of the rows with these parents, the sequence's pending rows from `first`
        on; None for a row without, which is fuzzy: one of a draft, or one that follows such a row."""
        if fuzzy:
            return [None] * len(parents)
        features, num_rows = self._features[seq_id], self.pool.cached_len(seq_id)
        start, end = features.start, features.end
        depths, positions = list(self._pending[seq_id].depths[:first]), list[int | None]()
        for parent in parents:
            depth = depths[parent] + 1 if parent >= 0 else 0
            depths.append(depth)
            after_text = parent < first or positions[parent - first] is not None
            positions.append(num_rows + depth if after_text and start <= num_rows + depth < end else None)
        return positions

    def _head(self, spans: Sequence[Span], hidden: Tensor) -> Tensor:  # noqa: ARG002  some read rows of their own
        """[N, H] -> logits [N, V], the target's."""
        return self.decoder.head(hidden)
