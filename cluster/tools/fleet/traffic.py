"""CellClients of a fleet: when requests arrive, to which cell they go, and what each has got of its text.

A client has token ids and nothing else: a stream whose cell is lost is sent to another one with the ids it has. Must
not know what drafts, or why a cell is lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache, partial
from statistics import median, quantiles

from actors.protocol.messages import Request, SamplingParams, Tokens
from cluster.tools.fleet.cell import Cell
from cluster.tools.fleet.description import Fleet
from cluster.tools.simulation.clock import ARRIVAL, VirtualClock
from cluster.tools.simulation.language import RequestText, TextSource

_TEXTS_KEPT = 2048
"""Texts in memory; one that is read later is drawn again, the same."""


@dataclass(slots=True, eq=False)
class Stream:
    """A request as its client sees it: the tokens it has, and the cell it was last sent to."""

    number: int
    region: str
    num_prompt: int
    num_output: int
    arrived: float
    tokens: list[int] = field(default_factory=list)
    cell: Cell | None = None
    first_at: float | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        return prompt_of(self.number, self.num_prompt)


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    return tuple(range(number, number + length))


@dataclass(slots=True)
class ClientCounts:
    """What clients saw; speeds and waits are of streams that ended in the measured time."""

    num_requests: int = 0
    num_tokens: int = 0
    num_measured: int = 0
    """Tokens that arrived in the measured time."""
    num_offered: int = 0
    """Tokens of the requests that arrived in it."""
    num_different: int = 0
    """Tokens that are not those of plain decoding, or missing from a stream that ended."""
    num_waiting: int = 0
    """Requests without a token at the end."""
    num_moves: int = 0
    num_far_moves: int = 0
    """Moves to another region."""
    speeds: list[float] = field(default_factory=list)
    """Tokens per second of a stream after its first token."""
    waits_s: list[float] = field(default_factory=list)
    """Seconds from the arrival to the first token."""

    @property
    def median_speed(self) -> float:
        return median(self.speeds) if self.speeds else 0.0

    @property
    def slow_speed(self) -> float:
        """Nine of ten streams are at least as fast."""
        return quantiles(self.speeds, n=10)[0] if len(self.speeds) > 1 else self.median_speed

    @property
    def median_wait_s(self) -> float:
        return median(self.waits_s) if self.waits_s else 0.0

    @property
    def long_wait_s(self) -> float:
        """The 95th percentile."""
        return quantiles(self.waits_s, n=20)[-1] if len(self.waits_s) > 1 else self.median_wait_s


class Traffic:
    """Sends requests to `cells`, which others change, and keeps what comes back."""

    def __init__(self, fleet: Fleet, clock: VirtualClock, cells: Collection[Cell], texts: TextSource) -> None:
        self.served = ClientCounts()
        self._fleet = fleet
        self._clock = clock
        self._cells = cells
        self._lengths = fleet.lengths
        self._random = random.Random(f"{fleet.seed} load")
        self._live: dict[int, Stream] = {}
        self._sizes: list[int] = []  # prompt tokens of every request so far
        self._loads: Counter[Cell] = Counter()
        self._homeless: list[Stream] = []  # while no cell is there
        self._texts = texts
        self.text_of = lru_cache(_TEXTS_KEPT)(self._text)

    def _text(self, number: int) -> RequestText:
        return self._texts.text(number, prompt_of(number, self._sizes[number]))

    def schedule_arrival(self) -> None:
        """The next request comes, and after it others."""
        when = self._clock.now + self._random.expovariate(self._fleet.load.requests_per_s)
        self._clock.at(when, ARRIVAL, self._arrive)

    def _arrive(self) -> None:
        fleet, draw = self._fleet, self._random
        shares = fleet.load.shares
        weights = [shares.get(region.name, 0.0) if shares else region.devices for region in fleet.regions]
        region = draw.choices(fleet.regions, weights)[0].name
        num_prompt, num_output = draw.choice(self._lengths)
        stream = Stream(len(self._sizes), region, num_prompt, num_output, self._clock.now)
        self._sizes.append(num_prompt)
        self._live[stream.number] = stream
        self.served.num_requests += 1
        self.served.num_offered += num_output if self._is_measured else 0
        self._submit(stream)
        self.schedule_arrival()

    @property
    def _is_measured(self) -> bool:
        return self._fleet.load.warmup_s <= self._clock.now <= self._fleet.load.seconds

    def _submit(self, stream: Stream) -> None:
        """Send a stream to a cell, with the tokens that its client has."""
        cell = stream.cell = self._choose(stream)
        if cell is None:
            self._homeless.append(stream)
            return
        self._loads[cell] += 1
        sampling = SamplingParams(max_tokens=stream.num_output)
        request = Request(stream.number, stream.prompt, sampling, generated=tuple(stream.tokens))
        self._clock.at(self._clock.now + self._delay_s(stream, cell), ARRIVAL, partial(cell.lane.take, request))

    def _choose(self, stream: Stream) -> Cell | None:
        """The cell with the fewest requests in the nearest region that has a place, else the one with the fewest."""
        places, loads = self._fleet.target.max_num_seqs, self._loads

        def cost(cell: Cell) -> tuple[bool, float, int]:
            load = loads[cell]
            is_full = load >= places
            return is_full, load if is_full else self._delay_s(stream, cell), load

        return min(self._cells, key=cost, default=None)

    def _delay_s(self, stream: Stream, cell: Cell) -> float:
        return self._fleet.links.delay_s(stream.region, cell.region)

    def move(self, lost: Cell) -> None:
        """The clients of a lost cell send their streams to others."""
        for stream in [one for one in self._live.values() if one.cell is lost]:
            self._submit(stream)
            self.served.num_moves += 1
            self.served.num_far_moves += stream.cell is not None and stream.cell.region != lost.region
        del self._loads[lost]

    def cell_came(self) -> None:
        """A cell was added: streams that found none go on."""
        streams, self._homeless = self._homeless, []
        for stream in streams:
            self._submit(stream)

    def emit(self, cell: Cell, tokens: Tokens) -> None:
        """Tokens leave a cell for their client."""
        stream = self._live.get(tokens.request_id)
        if stream is None:
            return
        if stream.region == cell.region:
            self._deliver(cell, stream, tokens)
        else:
            when = self._clock.now + self._delay_s(stream, cell)
            self._clock.at(when, ARRIVAL, partial(self._deliver, cell, stream, tokens))

    def _deliver(self, cell: Cell, stream: Stream, tokens: Tokens) -> None:
        """Tokens of a cell that the stream has left are dropped: the next one makes them again."""
        if stream.cell is not cell:
            return
        now, served = self._clock.now, self.served
        assert tokens.position == len(stream.tokens), "tokens arrive once and in order"
        stream.tokens += tokens.token_ids
        stream.first_at = now if stream.first_at is None else stream.first_at
        if self._is_measured:
            served.num_measured += len(tokens.token_ids)
        if tokens.finish_reason is not None:
            self._end(stream, cell)

    def _end(self, stream: Stream, cell: Cell) -> None:
        served, now = self.served, self._clock.now
        del self._live[stream.number]
        self._loads[cell] -= 1
        self._compare(stream)
        served.num_different += abs(stream.num_output - len(stream.tokens))
        if self._is_measured and stream.first_at is not None:
            served.waits_s.append(stream.first_at - stream.arrived)
            if now > stream.first_at:
                served.speeds.append((len(stream.tokens) - 1) / (now - stream.first_at))

    def _compare(self, stream: Stream) -> None:
        """Counts tokens that differ from the text, which is what plain decoding writes."""
        token = self.text_of(stream.number).token
        written = map(token, range(stream.num_prompt, stream.num_prompt + len(stream.tokens)))
        self.served.num_different += sum(one != other for one, other in zip(stream.tokens, written, strict=True))
        self.served.num_tokens += len(stream.tokens)

    def close(self) -> None:
        """The simulation ends: streams that go on are compared as far as they are."""
        for stream in self._live.values():
            self._compare(stream)
            self.served.num_waiting += not stream.tokens
