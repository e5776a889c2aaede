"""Passes of a draft model, or of its first layers alone before its norm and head: nested drafts (S2D, 2407.01955).

Rows that more layers wrote serve fewer: the keys and values of a layer depend on the layers below it only. So a
sequence begins with the whole model, may go over to fewer layers once, and never goes back. Knows no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from parallel.kv.pass_plan import Span
from parallel.kv.pool import KVPool, SeqId
from parallel.model.decoder import Decoder
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.runner import ModelRunner, PassOutput
from parallel.transfers import upload

ROWS_TO_CHOOSE = 16
"""Rows with logits of the whole model after which a sequence's number of layers is chosen."""


@dataclass(slots=True)
class _Confidence:
    """Of the rows seen so far, by nested model: the sum of the probability of the likeliest token, [models]."""

    num_rows: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(()))


class NestedRunner(ModelRunner):
    """`depths` are numbers of first layers. One of them serves every sequence from its start; of several a sequence
    goes over to the fewest whose confidence, the mean probability of their likeliest token, is at least `confidence`,
    and stays with the whole model where none is."""

    def __init__(self, decoder: Decoder, pool: KVPool, depths: Sequence[int], confidence: float) -> None:
        super().__init__(decoder, pool)
        self._whole = decoder.config.num_layers
        self._depths = sorted(set(depths))
        self._least = confidence
        self._chosen: dict[SeqId, int] = {}
        self._seen: dict[SeqId, _Confidence] = {}

    def depth_of(self, seq_id: SeqId) -> int:
        """Layers that the next pass of this sequence runs."""
        return self._chosen.get(seq_id, self._whole)

    def open(self, seq_id: SeqId) -> None:
        super().open(seq_id)
        if len(self._depths) == 1:
            self._chosen[seq_id] = self._depths[0]
        else:
            self._seen[seq_id] = _Confidence()

    def close(self, seq_id: SeqId) -> None:
        super().close(seq_id)
        self._chosen.pop(seq_id, None)
        self._seen.pop(seq_id, None)

    @torch.inference_mode()
    def forward(
        self,
        spans: Sequence[Span],
        token_ids: Tensor | Sequence[int],
        taps: Sequence[int] = (),
        *,
        fuzzy: bool = False,  # noqa: ARG002  every pass is exact
    ) -> PassOutput:
        """One pass for all sequences that run so many layers."""
        assert not taps, "a draft model has no taps"
        depths = sorted({self.depth_of(span.seq_id) for span in spans})
        if len(depths) == 1:
            return self._pass(depths[0], spans, token_ids)
        tokens = upload(token_ids, self.decoder.device)
        fed = tokens.split([span.num_tokens for span in spans])
        logits: dict[int, Tensor] = {}
        hidden: dict[int, Tensor] = {}
        for depth in depths:
            places = [i for i, span in enumerate(spans) if self.depth_of(span.seq_id) == depth]
            chosen = [spans[i] for i in places]
            output = self._pass(depth, chosen, torch.cat([fed[i] for i in places]))
            logits |= zip(places, output.logits.split([span.num_logits for span in chosen]), strict=True)
            hidden |= zip(places, output.hidden.split([span.num_tokens for span in chosen]), strict=True)
        order = range(len(spans))
        return PassOutput(torch.cat([logits[i] for i in order]), torch.cat([hidden[i] for i in order]), ())

    def _pass(self, depth: int, spans: Sequence[Span], token_ids: Tensor | Sequence[int]) -> PassOutput:
        plan = self.plan(spans)
        plan.layers = None if depth == self._whole else LayerPlan.prefix(depth)
        watched = depth == self._whole and any(span.num_logits and span.seq_id in self._seen for span in spans)
        output = self.run(plan, token_ids, self._depths if watched else ())
        if watched:
            self._watch(spans, output)
        return output

    def _watch(self, spans: Sequence[Span], output: PassOutput) -> None:
        """How sure the nested models are at the rows with logits; where these are enough, choose."""
        ends = accumulate(span.num_tokens for span in spans)
        rows = [range(end - span.num_logits, end) for span, end in zip(spans, ends, strict=True)]
        index = upload([row for each in rows for row in each], output.hidden.device)
        sure = [
            self.decoder.head(self.decoder.normalize(stream.index_select(0, index))).float().softmax(-1).amax(-1)
            for stream in output.features
        ]
        for span, part in zip(spans, torch.stack(sure, 1).split([len(each) for each in rows]), strict=True):
            seen = self._seen.get(span.seq_id)
            if seen is None or not len(part):
                continue
            seen.total = seen.total.to(part.device) + part.sum(0)
            seen.num_rows += len(part)
            if seen.num_rows >= ROWS_TO_CHOOSE:
                means = (seen.total / seen.num_rows).tolist()
                clear = [depth for depth, mean in zip(self._depths, means, strict=True) if mean >= self._least]
                self._chosen[span.seq_id] = min(clear, default=self._whole)
                del self._seen[span.seq_id]
