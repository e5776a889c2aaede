"""Draft passes of a target by some of its own layers, over its own KV rows.

A sequence's draft borrows the rows that the target has committed and adds rows of its own, in free slots of the
target's pool. They never enter the target's table, so what the target keeps is exact whatever the draft did. All draft
rows go back before the target reserves its own; what exact layers computed for them may be kept for the target's pass
(`resuming.py`). Knows no drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.kv.pool import SeqId
from parallel.kv.prefix_tree import Text
from parallel.kv.sequences import PooledSequences
from parallel.model.layer_plan import LayerPlan
from parallel.model.layers.attention import PassPlan
from parallel.runtime.borrowed_passes import BorrowedPasses
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.interface import PassOutput
from parallel.self_speculation.resuming import KeptRows, ResumingRunner


@dataclass(frozen=True, slots=True)
class RowsBehind:
    """The identifier in the pool of rows that one runner, by its `id`, adds behind some of a sequence."""

    seq_id: SeqId
    runner: int


@dataclass(frozen=True, slots=True)
class _PassMade:
    """A pass of drafts: its rows' tokens, and the residual stream after the `stop` leading whole layers, [T, H]."""

    spans: Sequence[Span]
    token_ids: Tensor | Sequence[int]
    stop: int
    states: Tensor


class SelfDraftRunner(BorrowedPasses):
    """Runs `layers` of the target's decoder, which may be replaced between two drafts.

    Its rows follow those of the target: `cached_len` is the target's until a draft keeps rows of its own. A
    draft begins with its first pass after `release_rows`. With `resumes`, the target's next pass takes over what draft
    rows computed in the leading layers that ran whole; only for rows that are nothing but tokens.
    """

    def __init__(self, target: DecoderRunner, layers: LayerPlan, *, resumes: bool = False) -> None:
        super().__init__(target, PooledSequences(target.pool))
        self.layers = layers
        self._drafts = self.sequences.pending
        self._resumes = resumes
        self._verifying: ResumingRunner | None = None
        self._passes_made: list[_PassMade] = []  # of the drafts that are open

    def verifying(self, target: DecoderRunner) -> DecoderRunner:
        """The runner for the target's own passes."""
        if not self._resumes:
            return target
        self._verifying = ResumingRunner(target)
        return self._verifying

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:
        """Nothing to set up: a draft begins with its first pass, behind the rows that the target has."""

    def set_source(self, seq_id: SeqId, token_ids: Sequence[int]) -> None:
        """The target has it, and a draft reads it there."""

    def close(self, seq_id: SeqId) -> None:
        draft = self._draft_of(seq_id)
        self._end(draft)
        if self._policy is not None:
            self._policy.forget(draft)

    def cached_len(self, seq_id: SeqId) -> int:
        draft = self._draft_of(seq_id)
        return self.pool.cached_len(draft) if draft in self._drafts else self.target.cached_len(seq_id)

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        """Keep rows for the rest of the draft; after its end the target has computed those of accepted tokens."""
        draft = self._draft_of(seq_id)
        if draft in self._drafts:
            super().commit(draft, keep, retain)

    def truncate(self, seq_id: SeqId, length: int) -> None:
        """Take rows of the draft back; those of the target are not the draft's to drop."""
        draft = self._draft_of(seq_id)
        if draft not in self._drafts:
            return
        if length < self.target.cached_len(seq_id):
            self._end(draft)
        else:
            super().truncate(draft, length)

    def release_rows(self) -> None:
        """End all drafts: the target is about to change its rows, and may need the slots."""
        if self._verifying is not None and self._passes_made:
            self._verifying.keep(self._kept_rows())
        for draft in list(self._drafts):
            self._end(draft)

    def forward(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], taps: Sequence[int] = (), *, fuzzy: bool = False
    ) -> PassOutput:
        stop = self.layers.exact_stop
        if self._verifying is None or not stop:
            return super().forward(spans, token_ids, taps, fuzzy=fuzzy)
        output = super().forward(spans, token_ids, (*taps, stop), fuzzy=fuzzy)
        *features, states = output.features
        self._passes_made.append(_PassMade(spans, token_ids, stop, states))
        return replace(output, features=tuple(features))

    def plan(self, spans: Sequence[Span]) -> PassPlan:
        if not self._drafts:
            self._passes_made.clear()
        drafts = [replace(span, seq_id=self._draft_of(span.seq_id)) for span in spans]
        for span, draft in zip(spans, drafts, strict=True):
            if draft.seq_id not in self._drafts:
                self.sequences.borrow(draft.seq_id, span.seq_id)
                if self._policy is not None:
                    self._policy.began(draft.seq_id, self.pool.cached_len(draft.seq_id))
        plan = super().plan(drafts)
        plan.layers = self.layers
        return plan

    def _kept_rows(self) -> dict[SeqId, KeptRows]:
        """What the open drafts' passes computed, by the sequence that they draft for."""
        tokens: dict[SeqId, list[int]] = {}
        states: dict[SeqId, list[Tensor]] = {}
        for made, all_fed in zip(self._passes_made, self._tokens_fed(), strict=True):
            first = 0
            for span in made.spans:
                rows = slice(first, first + span.num_tokens)
                tokens.setdefault(span.seq_id, []).extend(all_fed[rows])
                states.setdefault(span.seq_id, []).append(made.states[rows])
                first = rows.stop
        stop = self._passes_made[-1].stop  # layers are replaced between drafts only
        self._passes_made.clear()
        kept = {}
        for seq_id, fed in tokens.items():
            draft = self._draft_of(seq_id)
            if draft in self._drafts and len(self._drafts[draft].parents) == len(fed):  # none was committed
                context, parents = self.pool.cached_len(draft), self._drafts[draft].parents
                slots = self.pool.slots(draft)[context:].copy()
                rows = fed, parents, slots, torch.cat(states[seq_id])
                kept[seq_id] = KeptRows(context, stop, *rows)
        return kept

    def _tokens_fed(self) -> list[Sequence[int]]:
        """The tokens of each pass; those that are on the device are read together."""
        chosen = [made.token_ids for made in self._passes_made if isinstance(made.token_ids, Tensor)]
        read = iter(torch.cat(chosen).tolist() if chosen else ())
        return [
            list(islice(read, len(made.token_ids))) if isinstance(made.token_ids, Tensor) else made.token_ids
            for made in self._passes_made
        ]

    def _draft_of(self, seq_id: SeqId) -> RowsBehind:
        return RowsBehind(seq_id, id(self))

    def _end(self, draft: SeqId) -> None:
        if draft in self._drafts:
            self.sequences.close(draft)
