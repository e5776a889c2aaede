"""Passes of a layer-parallel decoder, and which of its KV rows are fuzzy.

A row is exact if an exact pass wrote it and all rows before it are exact, so exact rows are a prefix of a sequence's
rows. To make a fuzzy row exact the caller drops it (`drop_fuzzy`) and feeds its token again. Knows no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.kv.pool import KVPool, SeqId
from parallel.kv.prefix_tree import Text
from parallel.model.layer_parallel import LayerParallelDecoder
from parallel.model.layers.attention import PassPlan
from parallel.runtime.interface import PassOutput, run_by_kind
from parallel.runtime.runner import ModelRunner


class LayerParallelRunner(ModelRunner):
    """A `ModelRunner` whose passes may be fuzzy; `exact_len` is the number of leading exact rows of a sequence."""

    decoder: LayerParallelDecoder

    def __init__(self, decoder: LayerParallelDecoder, pool: KVPool, **options: Any) -> None:
        super().__init__(decoder, pool, **options)
        self._is_fuzzy = np.zeros(pool.num_slots, dtype=bool)  # by slot, so that edits of slot tables need no update

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:
        """Only exact rows of other sequences are taken."""
        super().open(seq_id, text)
        self.drop_fuzzy(seq_id)

    def plan(self, spans: Sequence[Span], *, fuzzy: bool = False) -> PassPlan:
        plan = super().plan(spans)
        plan.fuzzy = fuzzy and self.decoder.layout.has_fuzzy
        assert plan.fuzzy or not any(self._fuzzy_rows(span.seq_id)[: -span.num_tokens].any() for span in spans), (
            "an exact pass needs exact rows before its own"
        )
        for span in spans:
            self._is_fuzzy[self.pool.slots(span.seq_id)[-span.num_tokens :]] = plan.fuzzy
        return plan

    def forward(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], taps: Sequence[int] = (), *, fuzzy: bool = False
    ) -> PassOutput:
        """One pass; if it is to be exact, sequences with fuzzy rows run in a separate fuzzy pass."""

        def run_part(fuzzy: int, part: Sequence[Span], tokens: Tensor | Sequence[int]) -> PassOutput:
            return self.run(self.plan(part, fuzzy=bool(fuzzy)), tokens, taps)

        kinds = [fuzzy or bool(self._fuzzy_rows(span.seq_id).any()) for span in spans]
        return run_by_kind(spans, token_ids, kinds, run_part)

    def exact_len(self, seq_id: SeqId) -> int:
        """Number of committed rows before the first fuzzy one."""
        marks = self._fuzzy_rows(seq_id)[: self.cached_len(seq_id)]
        return int(marks.argmax()) if marks.any() else len(marks)

    def drop_fuzzy(self, seq_id: SeqId) -> bool:
        length = self.exact_len(seq_id)
        if length == self.cached_len(seq_id):
            return False
        self.truncate(seq_id, length)
        return True

    def _fuzzy_rows(self, seq_id: SeqId) -> np.ndarray:
        return self._is_fuzzy[self.pool.slots(seq_id)]
