"""Passes of draft layers (EAGLE-1 to 3.1, MTP): the rows of a text and of the trees drafted after it.

The row of token j is computed from that token and what is known of the position before it: the target's features, or,
where they are not there yet, the output of the row before, and the row is then fuzzy. Token 0 has no row, so the pool's
row r is that of token r + 1. Rows whose parents are in the same span are computed one pass after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.choice import Races, any_race, choose_rows
from parallel.kv.pass_plan import Span, lay_out
from parallel.kv.pool import SeqId
from parallel.model.block import attention_heads
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.ragged import RaggedBackend
from parallel.model.layers.rope import Rotation
from parallel.runtime.interface import StepChoice
from parallel.runtime.recorded_passes import RecordedPasses
from parallel.speculators.eagle.config import DraftLayerConfig
from parallel.speculators.eagle.layers import DraftLayers
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.runner import PooledRunner, SpeculatorRunner
from parallel.transfers import upload


@dataclass(slots=True)
class _Part:
    """Consecutive rows of one span that one pass can compute: `parents` are outside of it or have features."""

    span: Span
    token_ids: slice  # of the tokens of the whole call
    text: list[tuple[int, int]]  # (row within the part, position of its features)
    drafted: list[tuple[int, int]]  # (row within the part, pending row before it or -1)


class DraftLayerRunner(PooledRunner):
    """Passes of draft layers over a pool of their own."""

    first_row_token = 1

    def __init__(self, layers: DraftLayers, place: SpeculatorPlace, *, backend: str | None = None) -> None:
        super().__init__(layers, place, backend=backend)
        self.layers = layers
        self._passes = RecordedPasses(self._backend, place.group, [layers.rope], attention_heads([layers]))
        # by slot; the scratch slot stays zero
        self._outputs = torch.zeros(place.num_slots + 1, layers.config.block.hidden_size, **place.options)

    def _read(self, spans: Sequence[Span], token_ids: Tensor, *, fuzzy: bool) -> Tensor:
        starts = np.cumsum([0, *(span.num_tokens for span in spans)]).tolist()
        split = [self._parts(span, start, fuzzy=fuzzy) for span, start in zip(spans, starts, strict=False)]
        read: list[list[Tensor]] = [[] for _ in spans]
        for i in range(max(len(parts) for parts in split)):
            chosen = [k for k, parts in enumerate(split) if i < len(parts)]
            parts = [split[k][i] for k in chosen]
            normed = self._pass(parts, token_ids)
            for k, rows in zip(chosen, normed.split([part.span.num_logits for part in parts]), strict=True):
                read[k].append(rows)
        return torch.cat([rows for parts in read for rows in parts])

    @torch.inference_mode()
    def extend(
        self, spans: Sequence[Span], token_ids: Tensor | Sequence[int], choice: StepChoice, *, fuzzy: bool = False
    ) -> Tensor:
        """The passes behind the first one in one call where they are recorded."""
        first = choice.choose(self.forward(spans, token_ids, fuzzy=fuzzy).logits, 0)
        if len(choice) == 1:
            return first[None]
        seq_ids, rest = [span.seq_id for span in spans], choice.part(1, len(choice))
        chosen = self._extend_recorded(seq_ids, first, rest)
        if chosen is None:
            chosen = super().extend([Span(seq_id, 1) for seq_id in seq_ids], first, rest, fuzzy=True)
        return torch.cat([first[None], chosen])

    def _extend_recorded(self, seq_ids: Sequence[SeqId], token_ids: Tensor, choice: StepChoice) -> Tensor | None:
        """None where the passes of such a chain are not recorded."""
        num_steps, count = len(choice), len(seq_ids)
        like = torch.empty(0, dtype=torch.int64), any_race(), self._outputs
        run = self._passes.chain("chain", self._choose, like, count, num_steps)
        if run is None:
            return None
        laid_out = lay_out(self.pool, self._pending, [Span(seq_id, num_steps) for seq_id in seq_ids])
        rows = cast(RaggedBackend, self._backend).chain_rows(laid_out, num_steps)
        slots = np.array([own.slots[-num_steps:] for own in laid_out])
        before = [
            own.slots[-num_steps - 1] if len(own.slots) > num_steps else self.pool.scratch_slot for own in laid_out
        ]
        features = self._outputs.index_select(0, torch.from_numpy(np.array(before)))
        outputs = self._outputs.new_empty(num_steps, count, self._outputs.shape[1])
        races = Races(choice.race(), num_steps, count)
        made = [outputs.data_ptr() + step * outputs[0].nbytes for step in range(num_steps)]
        fed, known = [token_ids.data_ptr(), *races.places[:-1]], [features.data_ptr(), *made[:-1]]
        run(rows, list(zip(fed, races.addresses, known, strict=True)), [(one,) for one in made])
        self._outputs.index_copy_(0, torch.from_numpy(slots.T.flatten()), outputs.flatten(0, 1))
        self._is_fuzzy[slots] = True
        return races.chosen

    def _choose(self, entering: Sequence[Tensor], rotations: Sequence[Rotation], plan: PassPlan) -> list[Tensor]:
        """The tokens behind a pass over the first tensor's, by the race in the second one, with what precedes each row
        in the third; what rows after them read."""
        token_ids, race, features = entering
        normed, outputs = self.layers.rows((self.layers.embed(token_ids, self.decoder), features), rotations, plan)
        choose_rows(race.data_ptr(), self.layers.head(normed, self.decoder))
        return [outputs]

    def _head(self, spans: Sequence[Span], hidden: Tensor) -> Tensor:  # noqa: ARG002
        return self.layers.head(hidden, self.decoder)

    def _parts(self, span: Span, start: int, *, fuzzy: bool) -> list[_Part]:
        """The span cut where a drafted row's parent is in the same part."""
        first = len(self._pending[span.seq_id].parents)
        parents = range(first - 1, first + span.num_tokens - 1) if span.parents is None else span.parents
        positions = self._feature_positions(span.seq_id, first, parents, fuzzy=fuzzy)
        cuts: list[int] = []
        for row, parent in enumerate(parents):
            if positions[row] is None and parent - first >= (cuts[-1] if cuts else 0):
                cuts.append(row)
        parts, edges = [], [0, *cuts, span.num_tokens]
        for begin, end in pairwise(edges):
            rows = range(begin, end)
            wanted = max(0, end - max(begin, span.num_tokens - span.num_logits))
            part = Span(span.seq_id, len(rows), span.parents and parents[begin:end], wanted)
            text = [(row - begin, position) for row in rows if (position := positions[row]) is not None]
            drafted = [(row - begin, parents[row]) for row in rows if positions[row] is None]
            parts.append(_Part(part, slice(start + begin, start + end), text, drafted))
        return parts

    def _pass(self, parts: Sequence[_Part], token_ids: Tensor) -> Tensor:
        """What the head reads of the rows whose logits are asked for."""
        spans = [part.span for part in parts]
        plan = self._plan(spans)
        slots = []
        for part in parts:
            written = self.pool.slots(part.span.seq_id)[-part.span.num_tokens :]
            self._is_fuzzy[written] = False
            self._is_fuzzy[written[[row for row, _ in part.drafted]]] = True
            slots.append(written)
        tokens = (
            token_ids if len(token_ids) == plan.num_rows else torch.cat([token_ids[part.token_ids] for part in parts])
        )
        entering = self.layers.embed(tokens, self.decoder), self._features_of(parts)
        normed, outputs = self._passes.compute(self.layers.rows, plan, entering)
        self._outputs.index_copy_(0, upload(np.concatenate(slots), self._outputs.device), outputs)
        return plan.asked(normed)

    def _features_of(self, parts: Sequence[_Part]) -> Tensor:
        """What precedes each row, [T, H]."""
        known: list[Tensor] = []
        places: list[int] = []  # of the text's rows, then of the drafted ones
        drafted: list[int] = []  # slots
        first = 0
        for part in parts:
            if part.text:
                known.append(self._features[part.span.seq_id].rows([position for _, position in part.text]))
                places += [first + row for row, _ in part.text]
            first += part.span.num_tokens
        first = 0
        for part in parts:
            slots, num_rows = self.pool.slots(part.span.seq_id), self.pool.cached_len(part.span.seq_id)
            for row, parent in part.drafted:
                before = num_rows + parent
                drafted.append(int(slots[before]) if before >= 0 else self.pool.scratch_slot)
                places.append(first + row)
            first += part.span.num_tokens
        features = [self.layers.fused(torch.cat(known))] if known else []
        if drafted:
            features.append(self._outputs.index_select(0, upload(drafted, self._outputs.device)))
        if len(features) == 1:
            return features[0]
        order = np.argsort(places)
        return torch.cat(features).index_select(0, upload(order, self._outputs.device))


def open_runner(directory: Path, config: DraftLayerConfig, place: SpeculatorPlace) -> SpeculatorRunner:
    """Load the layers beside their target. ValueError, one line, if the checkpoint does not fit it or its own
    config.json."""
    layers = DraftLayers.opened(directory, config, place, reads_fused=place.reads_fused)
    layers.load_vocabulary(directory)
    if config.drafts_blocks:
        from parallel.speculators.eagle.parallel import ParallelEagleRunner  # for such layers alone

        return ParallelEagleRunner(layers, place)
    return DraftLayerRunner(layers, place)
