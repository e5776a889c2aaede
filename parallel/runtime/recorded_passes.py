"""Passes on a CPU whose kernels are called at once: where matrices are small, what Python and PyTorch do between the
calls of a pass of one row takes a third of its time, and of 80 rows a fifth.

The layers of a pass run over memory without contents, while their calls are recorded (`parallel/kernels/steps.py`);
passes of the same kind then make those calls over their own rows. The bits are those of the layers called one by one.
Layers that need an operation of PyTorch cannot be recorded and run as they are, and so do passes of very many rows.
Knows no sequences and no sampling.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from parallel.comm.group import Group
from parallel.kernels.attention import ChainRows
from parallel.kernels.choice import Race, Races, any_race, choose_rows
from parallel.kernels.steps import Arena, NotRecordable, Recorder, Steps, take_rows
from parallel.model.block import attention_heads
from parallel.model.decoder import Decoder, wanted_logits
from parallel.model.layer_plan import LayerPlan
from parallel.model.layers.attention import AttentionBackend, Heads, PassPlan
from parallel.model.layers.ragged import RaggedBackend, RaggedPlan
from parallel.model.layers.rope import Rope, Rotation

MOST_ROWS = 2048
"""Rows of a pass that is recorded, as many as a batch takes by default. A recording keeps room for the results of so
many; what no pass has filled yet takes no memory."""
WORTH_RECORDING = 5
"""Passes of one kind before which none is recorded: to record one of six layers takes about 2 ms, a recorded pass saves
0.3 ms, and drafters that search for layers to skip run most choices once."""
MOST_KINDS = 16
"""Kinds of which recordings are kept; the one that ran longest ago goes first."""

Rows = Tensor | array
"""What enters a pass: rows of numbers, or one whole number of 64 bits for each row."""
Compute = Callable[[Sequence[Tensor], Sequence[Rotation], PassPlan], Sequence[Tensor]]
"""Layers: what enters, with the pass's rows, a rotation for every rope, and the plan -> results with those rows."""


class Chain(Protocol):
    """Runs the passes of a chain: their rows, and for each of them the addresses of what enters and of what it
    makes."""

    def __call__(
        self, rows: ChainRows, entering: Sequence[Sequence[int]], made: Sequence[Sequence[int]] | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _Recording:
    steps: Steps
    results: list[tuple[int, torch.dtype]]
    """What each run makes: numbers of a row, and their type."""
    places: list[int]
    """What was computed, by its places among what enters and then `results`."""


@dataclass(slots=True)
class _Use:
    num_passes: int = 0
    recording: _Recording | None = None


class RecordedPasses:
    """Runs layers over the rows of passes that `backend` plans: `heads` are those of their attention, `reading` those
    that read a source. With several ranks in the group, or another backend than the kernels', nothing is recorded."""

    def __init__(
        self,
        backend: AttentionBackend,
        group: Group,
        ropes: Sequence[Rope],
        heads: Sequence[Heads],
        reading: Sequence[Heads] = (),
    ) -> None:
        self._backend = backend if isinstance(backend, RaggedBackend) and group.size == 1 else None
        self._ropes = ropes
        self._heads = heads
        self._reading = reading
        self._no_rows = self._backend and PassPlan(0, torch.empty(0), None, self._backend.any_plan(()))
        self._arena = Arena()
        self._uses: OrderedDict[Hashable, _Use] = OrderedDict()

    def compute(self, layers: Compute, plan: PassPlan, entering: Sequence[Tensor]) -> Sequence[Tensor]:
        """What these layers, the only ones, compute; recorded where they can be."""
        recorded = self.run(None, layers, plan, entering)
        if recorded is not None:
            return recorded
        plan.attention.prepare()
        return layers(entering, [rope(plan.positions) for rope in self._ropes], plan)

    def run(self, kind: Hashable, layers: Compute, plan: PassPlan, entering: Sequence[Rows]) -> Sequence[Tensor] | None:
        """What `layers` compute, which are the same ones for passes of one kind; None if there is no recording of it,
        or not yet."""
        attention = plan.attention
        if plan.num_rows > MOST_ROWS or not isinstance(attention, RaggedPlan):  # one that is watched
            return None
        recording = self._recording(kind, layers, plan, entering)
        if recording is None:
            return None
        rows: list[Any] = [one if isinstance(one, array) else one.contiguous() for one in entering]
        numbers = [plan.num_rows, *_addresses(plan), *map(_address, rows), attention.rows.of_positions]
        for rope in self._ropes:
            numbers += rope.table_addresses(attention.last_position)
        for size, dtype in recording.results:
            made = _empty(plan.num_rows, size, dtype)
            numbers.append(made.data_ptr())
            rows.append(made)
        recording.steps.run(numbers)
        return [rows[place] for place in recording.places]

    def chain(
        self, kind: Hashable, layers: Compute, like: Sequence[Rows], num_rows: int, num_passes: int
    ) -> Chain | None:
        """Runs so many passes of a kind, each of so many rows at most, one after the other in one call: what enters one
        may be what the pass before it makes. None where they are not recorded. What enters are rows like these."""
        if self._no_rows is None or num_rows > MOST_ROWS:
            return None
        recording = self._recording(kind, layers, self._no_rows, like, num_passes)
        return None if recording is None else partial(self._run_chain, recording)

    def _run_chain(
        self,
        recording: _Recording,
        rows: ChainRows,
        entering: Sequence[Sequence[int]],
        made: Sequence[Sequence[int]] | None = None,
    ) -> None:
        tables = [address for rope in self._ropes for address in rope.table_addresses(rows.last_position)]
        made = [()] * len(entering) if made is None else made
        assert len(made[0]) == len(recording.results)
        passes = zip(rows.num_rows, rows.addresses, entering, rows.positions, made, strict=True)
        recording.steps.run(*[(count, plan, *enters, at, *tables, *makes) for count, plan, enters, at, makes in passes])

    def _recording(
        self, kind: Hashable, layers: Compute, plan: PassPlan, entering: Sequence[Rows], num_passes: int = 1
    ) -> _Recording | None:
        """What was recorded for so many passes more; None where nothing is, or not yet."""
        if self._backend is None:
            return None
        use = self._uses.get(kind)
        if use is None:
            use = self._uses[kind] = _Use()
            if len(self._uses) > MOST_KINDS:
                self._uses.popitem(last=False)
        else:
            self._uses.move_to_end(kind)
        is_worth_it = use.num_passes < WORTH_RECORDING <= use.num_passes + num_passes
        use.num_passes += num_passes
        if is_worth_it:
            use.recording = self._record(layers, self._backend, plan, entering)
        return use.recording

    @torch.inference_mode()
    def _record(
        self, layers: Compute, backend: RaggedBackend, plan: PassPlan, like: Sequence[Rows]
    ) -> _Recording | None:
        """None where the layers cannot be recorded; what enters are rows like these."""
        entering = [
            torch.empty(MOST_ROWS, dtype=torch.int64)
            if isinstance(one, array)
            else one.new_empty(MOST_ROWS, *one.shape[1:])
            for one in like
        ]
        positions = torch.zeros(MOST_ROWS, dtype=torch.int64)
        tables = [rope.table(0) for rope in self._ropes]
        source = None if plan.source is None else backend.any_plan(self._reading, reads=True)
        attention = backend.any_plan(self._heads)
        plan = replace(plan, num_rows=MOST_ROWS, places=positions, attention=attention, source=source)
        given = *entering, positions, *(part for table in tables for part in table)
        with Recorder(self._arena, MOST_ROWS, [*_addresses(plan), *map(Tensor.data_ptr, given)]) as recorder:
            try:
                rotations = [(take_rows(cos, positions), take_rows(sin, positions)) for cos, sin in tables]
                wanted = layers(entering, rotations, plan)
            except NotRecordable:
                return None
        known = {one.data_ptr(): one for one in entering}
        results = list({one.data_ptr(): one for one in wanted if one.data_ptr() not in known}.values())
        addresses = [*known, *(one.data_ptr() for one in results)]
        places = [addresses.index(one.data_ptr()) for one in wanted]
        return _Recording(recorder.steps(results), [(one.shape[1], one.dtype) for one in results], places)


def _address(rows: Rows) -> int:
    return rows.buffer_info()[0] if isinstance(rows, array) else rows.data_ptr()


def _addresses(plan: PassPlan) -> list[int]:
    """Where the kernels find the rows of the pass and, if it has one, those of a source."""
    parts = (plan.attention,) if plan.source is None else (plan.attention, plan.source)
    return [part.rows.address for part in parts if isinstance(part, RaggedPlan)]


def _empty(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Room for so many rows. NumPy keeps Python's lock, which PyTorch gives up while it allocates: a thread
    that waits for it would take it just before the pass, not beside it."""
    if dtype != torch.float32:
        return torch.empty(num_rows, size, dtype=dtype)
    return torch.from_numpy(np.empty((num_rows, size), dtype=np.float32))


def _token_rows(token_ids: Tensor | Sequence[int]) -> Rows:
    """Without a tensor where there is none yet: its making takes PyTorch longer than all other numbers of a pass."""
    return token_ids.contiguous() if isinstance(token_ids, Tensor) else array("q", token_ids)


class _PassKind(NamedTuple):
    """What passes of a decoder share that are recorded once."""

    layers: LayerPlan | None
    taps: tuple[int, ...]
    enters: bool
    """Whether the pass begins with a given stream, not with tokens."""
    has_logits: bool
    """Whether the head reads every row."""


_CHAIN = _PassKind(None, (), enters=False, has_logits=True)


class RecordedDecoder:
    """Runs passes of a decoder of one rank, whose attention is planned by `backend`."""

    def __init__(self, decoder: Decoder, backend: RaggedBackend) -> None:
        self._decoder = decoder
        self._like_choices = array("q"), any_race()
        layers = decoder.layers
        self.passes = RecordedPasses(
            backend,
            decoder.group,
            [rope for rope in (decoder.rope, decoder.local_rope) if rope is not None],
            attention_heads(layers),
            [one.cross.heads for one in layers if one.cross is not None],
        )

    def forward(
        self, token_ids: Tensor | Sequence[int], plan: PassPlan, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor] | None:
        """What `run_pass` computes; None where such passes are not recorded."""
        kind = _PassKind(plan.layers, tuple(taps), plan.entering is not None, plan.logit_rows is None)
        entering: list[Rows] = [plan.entering] if plan.entering is not None else [_token_rows(token_ids)]
        made = self.passes.run(kind, partial(self._compute, kind), plan, entering)
        if made is None and kind.has_logits:
            kind = kind._replace(has_logits=False)
            made = self.passes.run(kind, partial(self._compute, kind), plan, entering)
        if made is None:
            return None
        if kind.has_logits:
            return made[0], tuple(made[1:-1]), made[-1]
        with torch.inference_mode():
            return made[0], tuple(made[1:]), wanted_logits(self._decoder, made[0], plan)

    def chain(
        self, num_rows: int, num_steps: int
    ) -> Callable[[Tensor | Sequence[int], ChainRows, Race], Tensor] | None:
        """Runs the passes of a chain of so many steps, the first of so many rows (`_run_chain`), if they are
        recorded."""
        run = self.passes.chain("chain", self._choose, self._like_choices, num_rows, num_steps)
        return None if run is None else partial(self._run_chain, run)

    def _run_chain(self, run: Chain, token_ids: Tensor | Sequence[int], rows: ChainRows, race: Race) -> Tensor:
        """Feed `token_ids`, the rows of the first pass, choose by the race from the logits of every sequence's last
        one, feed what was chosen, and so on: the tokens that are chosen, [steps, sequences]."""
        races = Races(race, len(rows.num_rows), rows.num_spans, rows=rows.ends)
        fed = _token_rows(token_ids)
        run(rows, list(zip((_address(fed), *races.places[:-1]), races.addresses, strict=True)))
        return races.chosen

    def _choose(self, entering: Sequence[Tensor], rotations: Sequence[Rotation], plan: PassPlan) -> list[Tensor]:
        """The tokens behind a pass over the first tensor's, by the race in the second one."""
        token_ids, race = entering
        *_, logits = self._compute(_CHAIN, [token_ids], rotations, plan)
        choose_rows(race.data_ptr(), logits)
        return []

    def _compute(
        self, kind: _PassKind, entering: Sequence[Tensor], rotations: Sequence[Rotation], plan: PassPlan
    ) -> list[Tensor]:
        """The final hidden states, the stream of every tap and the logits, where the kind has them."""
        decoder, (stream,) = self._decoder, entering
        if not kind.enters:
            stream = decoder.embed(stream, plan.positions)
        ropes = (rotations[0], rotations[-1]) if rotations else (None, None)
        last, features = decoder.run_blocks(stream, ropes, plan, kind.layers, kind.taps)
        hidden = decoder.normalize(last)
        return [hidden, *features, *([decoder.head(hidden)] if kind.has_logits else [])]
