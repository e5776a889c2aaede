"""A target's pass that goes on where draft passes of its own first layers left off.

Draft rows that ran the first layers whole have exact keys and values there, and their exact residual stream. Where
the tokens of a row and of its ancestors are those of a kept draft row, the pass takes both over: only the other rows
run those layers, and all rows run the rest. Results are those of a pass from the start. Knows rows, not drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from parallel.kv.pass_plan import PendingRows, Span, SpanRows, logit_rows
from parallel.kv.pool import SeqId
from parallel.model.layer_plan import LayerPlan
from parallel.runtime.borrowed_passes import BorrowedPasses
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.interface import PassOutput
from parallel.transfers import to_device, upload


@dataclass(slots=True)
class KeptRows:
    """Draft rows of one sequence behind `context` committed ones, after `stop` whole layers.

    `parents` as in `Span`. Their slots are free, and written by nothing before the next pass of the target.
    """

    context: int
    stop: int
    token_ids: list[int]
    parents: Sequence[int]
    slots: np.ndarray
    states: Tensor  # [rows, H], the residual stream

    def sources(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The row that is kept of each row of a forest behind the same text, or -1."""
        children: dict[tuple[int, int], int] = {}
        for row, place in enumerate(zip(self.parents, self.token_ids, strict=True)):
            children.setdefault(place, row)
        found: list[int] = []
        for token, parent in zip(token_ids, parents, strict=True):
            above = -1 if parent < 0 else found[parent]
            found.append(-1 if parent >= 0 and above < 0 else children.get((above, token), -1))
        return found


class ResumingRunner(BorrowedPasses):
    """The target with the same sequences, rows and passes, some of which begin above the draft's layers."""

    def __init__(self, target: DecoderRunner) -> None:
        super().__init__(target, target.sequences)
        self._kept: dict[SeqId, KeptRows] = {}

    def keep(self, kept: dict[SeqId, KeptRows]) -> None:
        """Rows for the next pass, in which they are used or dropped."""
        self._kept |= kept

    def close(self, seq_id: SeqId) -> None:
        self._kept.pop(seq_id, None)
        super().close(seq_id)

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], taps: Sequence[int] = (), *, fuzzy: bool = False
    ) -> PassOutput:
        kept, self._kept = self._kept, {}
        stops = {rows.stop for rows in kept.values()}
        if len(stops) != 1 or min(taps, default=max(stops)) < max(stops):
            return self.target.forward(spans, token_ids, taps, fuzzy=fuzzy)
        stop = stops.pop()
        tokens: list[int] = token_ids.tolist() if isinstance(token_ids, Tensor) else list(token_ids)
        laid_out = self.lay_out(spans)
        taken = [_Taken.of(rows, kept.get(span.seq_id), tokens) for span, rows in zip(spans, laid_out, strict=True)]
        self._take_over(taken, stop)
        plan = self.plan_rows(laid_out, logit_rows(spans))
        plan.layers = LayerPlan.span(stop, self.config.num_layers)
        states = plan.entering = self._states(taken, tokens, stop, len(plan.positions))
        above = [tap for tap in taps if tap > stop]
        output = self.run(plan, tokens, above)
        features = dict(zip(above, output.features, strict=True)) | {stop: states[: len(tokens)]}
        return replace(output, features=tuple(features[tap] for tap in taps))

    def _take_over(self, taken: Sequence[_Taken], stop: int) -> None:
        """Copy keys and values of kept rows to the slots of the pass; mostly they lie there already."""
        old, new = (np.concatenate(slots) for slots in zip(*(one.moves() for one in taken), strict=True))
        if np.array_equal(old, new):
            return
        self.pool.copy(range(stop), *to_device([old, new], self.pool.keys.device))

    def _states(self, taken: Sequence[_Taken], tokens: list[int], stop: int, num_rows: int) -> Tensor:
        """The residual stream after `stop` layers, [`num_rows`, H]: of kept rows as it was, of the others by a pass."""
        device, size = self.decoder.device, self.config.hidden_size
        states = torch.zeros(num_rows, size, dtype=self.decoder.dtype, device=device)
        fresh = [rows for rows in (one.fresh_rows() for one in taken) if rows is not None]
        if fresh:
            first, laid_out = 0, []
            for rows in fresh:
                laid_out.append(replace(rows, first=first))
                first += rows.num_rows
            plan = self.plan_rows(laid_out, [])
            plan.layers = LayerPlan.prefix(stop)
            places = [row for one in taken for row in one.places(kept=False)]
            computed = self.run(plan, [tokens[row] for row in places], (stop,)).features[0]
            states.index_copy_(0, upload(places, device), computed)
        for one in taken:
            if one.kept is not None and (rows := one.places(kept=True)):
                found = upload([source for source in one.sources if source >= 0], device)
                states.index_copy_(0, upload(rows, device), one.kept.states.index_select(0, found))
        return states


@dataclass(slots=True)
class _Taken:
    """A span of the pass, and which kept row each of its rows takes over, -1: none."""

    rows: SpanRows
    kept: KeptRows | None
    sources: list[int]

    @staticmethod
    def of(rows: SpanRows, kept: KeptRows | None, tokens: Sequence[int]) -> _Taken:
        if kept is None or rows.context != kept.context or rows.first_pending:
            return _Taken(rows, None, [-1] * rows.num_rows)
        return _Taken(rows, kept, kept.sources(tokens[rows.rows], rows.pending.parents))

    def places(self, *, kept: bool) -> list[int]:
        """Rows of the pass that take a kept row over, or those that do not."""
        return [self.rows.first + i for i, source in enumerate(self.sources) if (source >= 0) == kept]

    def moves(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots in which kept rows lay, and those of the pass's rows that take them over."""
        sources = np.array(self.sources, dtype=np.int64)
        is_taken = sources >= 0
        if self.kept is None:
            return sources[is_taken], sources[is_taken]
        return self.kept.slots[sources[is_taken]], self.rows.written_slots[is_taken]

    def fresh_rows(self) -> SpanRows | None:
        """The rows that take none over, as the last of the span's rows; None if all do."""
        rows, count = self.rows, self.sources.count(-1)
        if count in (0, rows.num_rows):
            return rows if count else None
        order = sorted(range(rows.num_rows), key=lambda row: self.sources[row] < 0)  # stable: parents stay in front
        if order == list(range(rows.num_rows)):
            return replace(rows, num_rows=count)
        place = {row: i for i, row in enumerate(order)} | {-1: -1}
        pending = PendingRows()
        pending.append(rows.num_rows, [place[rows.pending.parents[row]] for row in order])
        slots = np.concatenate([rows.slots[: rows.context], rows.written_slots[order]])
        return replace(rows, num_rows=count, table=slots, run=None, pending=pending)
