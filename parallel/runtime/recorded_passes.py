"""Passes of few rows on a CPU whose kernels are called at once: where matrices are small, what Python does between the
calls of a pass takes a third of its time.

The layers of a decoder run over memory without contents, while their calls are recorded
(`parallel/kernels/steps.py`); passes of the same sublayers and taps then make those calls over their own rows. The bits
are those of `run_pass`. Layers that need an operation of PyTorch cannot be recorded and run as they are, and so do
passes of many rows. Knows no sequences and no sampling.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.kernels.steps import Arena, NotRecordable, Recorder, Steps, take_rows
from parallel.model.decoder import Decoder, run_pass, wanted_logits
from parallel.model.layer_plan import LayerPlan
from parallel.model.layers.attention import PassPlan
from parallel.model.layers.ragged import RaggedBackend, RaggedPlan, RaggedReads

MOST_ROWS = 64
"""Rows of a pass that is recorded: with more, what is between the kernels hardly counts, and a recording keeps room for
the results of so many."""
WORTH_RECORDING = 5
"""Passes of one kind before which none is recorded: to record one of six layers takes about 2 ms, a recorded pass saves
0.3 ms, and drafters that search for layers to skip run most choices once."""
MOST_KINDS = 16
"""Kinds of which recordings are kept; the one that ran longest ago goes first."""


class _PassKind(NamedTuple):
    """What passes of one recording share."""

    layers: LayerPlan | None
    taps: tuple[int, ...]
    enters: bool
    """Whether the pass begins with a given stream, not with tokens."""
    has_logits: bool
    """Whether the head reads every row."""


@dataclass(frozen=True, slots=True)
class _Recording:
    steps: Steps
    results: list[Tensor]
    """Over memory of the recording, which a run replaces: their sizes and types."""
    places: tuple[int | None, ...]
    """The final hidden states, the stream of every tap and the logits, where the kind has them, by their places in
    `results`; None for the stream that entered."""


@dataclass(slots=True)
class _Use:
    num_passes: int = 0
    recording: _Recording | None = None


class RecordedPasses:
    """Runs passes of a decoder of one rank, whose attention is planned by `backend`."""

    def __init__(self, decoder: Decoder, backend: RaggedBackend) -> None:
        self._decoder = decoder
        self._backend = backend
        self._ropes = [rope for rope in (decoder.rope, decoder.local_rope) if rope is not None]
        self._arena = Arena()
        self._uses: OrderedDict[_PassKind, _Use] = OrderedDict()

    def forward(
        self, token_ids: Tensor, plan: PassPlan, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Computes what `run_pass` computes."""
        kind = _PassKind(plan.layers, tuple(taps), plan.entering is not None, plan.logit_rows is None)
        if plan.num_rows > MOST_ROWS:
            return run_pass(self._decoder, token_ids, plan, taps)
        recording = self._recording(kind)
        if recording is None and kind.has_logits:
            recording = self._recording(kind := kind._replace(has_logits=False))
        if recording is None:
            return run_pass(self._decoder, token_ids, plan, taps)
        entering = (token_ids if plan.entering is None else plan.entering).contiguous()
        tables = [table for rope in self._ropes for table in rope.table(plan.positions)]
        made = [torch.empty(plan.num_rows, one.shape[1], dtype=one.dtype) for one in recording.results]
        tensors = entering, plan.positions, *tables, *made
        recording.steps.run(plan.num_rows, [*_addresses(plan), *map(Tensor.data_ptr, tensors)])
        hidden, *others = (entering if place is None else made[place] for place in recording.places)
        logits = others.pop() if kind.has_logits else wanted_logits(self._decoder, hidden, plan)
        return hidden, tuple(others), logits

    def _recording(self, kind: _PassKind) -> _Recording | None:
        use = self._uses.setdefault(kind, _Use())
        self._uses.move_to_end(kind)
        if len(self._uses) > MOST_KINDS:
            self._uses.popitem(last=False)
        use.num_passes += 1
        if use.num_passes == WORTH_RECORDING:
            use.recording = self._record(kind)
        return use.recording

    def _record(self, kind: _PassKind) -> _Recording | None:
        """None where the layers, or the head, cannot be recorded."""
        decoder, backend = self._decoder, self._backend
        attention = backend.any_plan(one.attention.heads for one in decoder.layers if one.attention is not None)
        source = None
        if decoder.config.encoder is not None:
            source = backend.any_reads(one.cross.heads for one in decoder.layers if one.cross is not None)
        positions, token_ids = torch.zeros(MOST_ROWS, dtype=torch.int64), torch.zeros(MOST_ROWS, dtype=torch.int64)
        stream = torch.empty(MOST_ROWS, decoder.config.hidden_size, dtype=decoder.dtype)
        entering = stream if kind.enters else token_ids
        tables = [table for rope in self._ropes for table in rope.table(positions)]
        plan = PassPlan(MOST_ROWS, positions, None, attention, layers=kind.layers, source=source)
        given = [*_addresses(plan), *map(Tensor.data_ptr, (entering, positions, *tables))]
        with Recorder(self._arena, MOST_ROWS, given) as recorder:
            try:
                rotations = [take_rows(table, positions) for table in tables]
                if not kind.enters:
                    stream = decoder.embed(token_ids, positions)
                ropes = (
                    (rotations[0], rotations[1]) if rotations else None,
                    (rotations[-2], rotations[-1]) if rotations else None,
                )
                last, features = decoder.run_blocks(stream, ropes, plan, kind.layers, kind.taps)
                hidden = decoder.normalize(last)
                wanted = [hidden, *features, *([decoder.head(hidden)] if kind.has_logits else [])]
            except NotRecordable:
                return None
        results = list({one.data_ptr(): one for one in wanted if one is not entering}.values())
        addresses = [one.data_ptr() for one in results]
        places = tuple(None if one is entering else addresses.index(one.data_ptr()) for one in wanted)
        return _Recording(recorder.steps(results), results, places)


def _addresses(plan: PassPlan) -> list[int]:
    """Where the kernels find the rows of the pass and, if it has one, those of a source."""
    assert isinstance(plan.attention, RaggedPlan)
    if plan.source is None:
        return [plan.attention.address]
    assert isinstance(plan.source, RaggedReads)
    return [plan.attention.address, plan.source.address]
