"""Passes of a draft model, or of its first layers alone before its norm and head: nested drafts (S2D, 2407.01955).

How many layers run is chosen for every draft, by how sure the nested models were at the first rows of the latest ones.
Rows that more layers wrote serve fewer: the keys and values of a layer depend on the layers below it only. To go over
to more layers, the rows that fewer wrote are dropped and their tokens fed again. Knows no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.kv.pool import KVPool, SeqId
from parallel.kv.prefix_tree import Text
from parallel.model.decoder import Decoder
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.interface import PassOutput, Runner, StepChoice, run_by_kind
from parallel.runtime.runner import ModelRunner
from parallel.transfers import upload

MEMORY = 0.75
"""Weight of the past in a confidence for each draft: about the last four count."""


@dataclass(slots=True)
class _NestedState:
    """`depth` layers run. `num_rows[d]` leading rows were written by d layers or more. `sure[d]` is the confidence of d
    layers, for those that ran last; `seen` are theirs at the latest draft, still on the device."""

    depth: int
    num_rows: dict[int, int]
    sure: dict[int, float] = field(default_factory=dict)
    seen: tuple[Sequence[int], Tensor] | None = None

    def cut(self, length: int) -> None:
        self.num_rows = {depth: min(rows, length) for depth, rows in self.num_rows.items()}

    def wrote(self, length: int) -> None:
        self.num_rows = {depth: length if depth <= self.depth else rows for depth, rows in self.num_rows.items()}

    def observe(self) -> None:
        if self.seen is not None:
            latest = dict(zip(self.seen[0], self.seen[1].tolist(), strict=True))
            before = latest | self.sure
            self.sure = {depth: MEMORY * before[depth] + (1 - MEMORY) * one for depth, one in latest.items()}
            self.seen = None


class NestedRunner(ModelRunner):
    """`depths` are numbers of first layers. One of them serves every sequence. Of several, and the whole model, the
    fewest serve whose confidence, the probability of their likeliest token, is at least `confidence`; if no model that
    ran has it, the next larger one is tried. The prompt is read by the whole model."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, depths: Sequence[int], confidence: float, *, backend: str | None = None
    ) -> None:
        super().__init__(decoder, pool, backend=backend)
        self._whole = decoder.config.num_layers
        self._depths = sorted({*depths, self._whole} if len(set(depths)) > 1 else set(depths))
        self._least = confidence
        self._sequences: dict[SeqId, _NestedState] = {}

    @property
    def split_head(self) -> None:
        """None: it reads whole rows of logits itself, of the models that it compares."""

    def depth_of(self, seq_id: SeqId) -> int:
        """Layers that the next pass of this sequence runs."""
        return self._sequences[seq_id].depth

    def open(self, seq_id: SeqId, text: Text | None = None) -> None:  # noqa: ARG002
        """Opens without rows of other sequences: how many layers wrote them is not known."""
        super().open(seq_id)
        self._sequences[seq_id] = _NestedState(self._depths[-1], dict.fromkeys(self._depths, 0))

    def close(self, seq_id: SeqId) -> None:
        super().close(seq_id)
        del self._sequences[seq_id]

    def commit(self, seq_id: SeqId, keep: Sequence[int], retain: Sequence[int] = ()) -> None:
        super().commit(seq_id, keep, retain)
        self._sequences[seq_id].wrote(self.cached_len(seq_id))

    def truncate(self, seq_id: SeqId, length: int) -> None:
        super().truncate(seq_id, length)
        self._sequences[seq_id].cut(length)

    def drop_fuzzy(self, seq_id: SeqId) -> bool:
        """Choose the layers of the next draft; if more, drop the rows that fewer wrote, and return whether it is so."""
        sequence = self._sequences[seq_id]
        sequence.observe()
        before, sequence.depth = sequence.depth, self._choice(sequence)
        if sequence.depth > before:
            self.truncate(seq_id, sequence.num_rows[sequence.depth])
        return sequence.depth > before

    def _choice(self, sequence: _NestedState) -> int:
        if not sequence.sure:
            return sequence.depth
        clear = [depth for depth, sure in sequence.sure.items() if sure >= self._least]
        return min(clear, default=next((depth for depth in self._depths if depth > sequence.depth), self._whole))

    @torch.inference_mode()
    def forward(
        self,
        spans: Sequence[Span],
        token_ids: Tensor | Sequence[int],
        taps: Sequence[int] = (),
        *,
        fuzzy: bool = False,
    ) -> PassOutput:
        """One pass for all sequences that run so many layers. Passes that are not `fuzzy`, the first of a draft, tell
        how sure the nested models are."""
        assert not taps, "a draft model has no taps"
        watched = len(self._depths) > 1 and not fuzzy
        depths = [self.depth_of(span.seq_id) for span in spans]
        return run_by_kind(spans, token_ids, depths, partial(self._pass, watched=watched))

    def extend(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], choice: StepChoice, *, fuzzy: bool = False
    ) -> Tensor:
        """Pass by pass: each runs the layers that its sequences choose."""
        return Runner.extend(self, spans, token_ids, choice, fuzzy=fuzzy)

    def _pass(
        self, depth: int, spans: Sequence[Span], token_ids: Tensor | Sequence[int], *, watched: bool
    ) -> PassOutput:
        plan = self.plan(spans)
        plan.layers = None if depth == self._whole else LayerPlan.prefix(depth)
        watched = watched and any(span.num_logits for span in spans)
        nested = [one for one in self._depths if one < depth] if watched else []
        output = self.run(plan, token_ids, nested)
        if watched:
            self._watch([*nested, depth], spans, output)
        return replace(output, features=())

    def _watch(self, depths: Sequence[int], spans: Sequence[Span], output: PassOutput) -> None:
        """How sure the models that ran are at the last row of each sequence that has logits."""
        rows, places = (
            [end - 1 for end, span in zip(accumulate(numbers), spans, strict=True) if span.num_logits]
            for numbers in ([span.num_tokens for span in spans], [span.num_logits for span in spans])
        )
        seq_ids = [span.seq_id for span in spans if span.num_logits]
        index = upload(rows, output.hidden.device)
        nested = [self.decoder.head(self.decoder.normalize(one.index_select(0, index))) for one in output.features]
        logits = [*nested, output.logits.index_select(0, upload(places, output.logits.device))]
        sure = torch.stack([one.float().softmax(-1).amax(-1) for one in logits], 1)
        for seq_id, part in zip(seq_ids, sure, strict=True):
            self._sequences[seq_id].seen = depths, part
