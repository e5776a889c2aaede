"""A draft pool on the virtual clock: one device whose passes merge the rows of the draft roles of several coordinators.

Each lease has a draft role of its own, the engine's. What a role does with a record, or in a step of draft-ahead,
depends on no clock but in what it reports, so it runs at once and its passes are written down; the pool then takes them
one after the other, and `Merging` says of which roles each of its passes has the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from actors.protocol.messages import ProposalBatch
from actors.roles.draft import DraftRole
from cluster.tools.fleet.description import Merging
from cluster.tools.simulation.clock import STEP, LaneClock, VirtualClock
from parallel.pass_cost import PassCost


class PassLog:
    """Stands for the cost of a role's passes: writes each down, and says what it should take beside the others'."""

    def __init__(self, cost: PassCost) -> None:
        self.passes: list[tuple[int, int]] = []
        self.beside = 0
        self._cost = cost

    def __call__(self, rows: int, context: int = 0) -> float:
        self.passes.append((rows, context))
        return self._cost(rows + self.beside, context)


class _Kind(Enum):
    order = 1
    reading = 2
    step = 3


@dataclass(slots=True)
class _Work:
    """Passes still to take, and the records that leave once so many of them are done."""

    kind: _Kind
    passes: deque[tuple[int, int]]
    records: deque[tuple[int, Any]]
    num_done: int = 0
    started: float = 0.0


@dataclass(slots=True)
class Leased:
    """One coordinator's part of a pool: its draft role, and what arrived for it."""

    role: DraftRole
    time: LaneClock
    log: PassLog
    send: Callable[[Any, float], None]
    inbox: deque[Any] = field(default_factory=deque)
    work: _Work | None = None
    busy_s: float = 0.0
    """Time of the passes that had rows of it, by its share of the rows."""

    def is_at(self, kind: _Kind) -> bool:
        return self.work is not None and self.work.kind is kind


class PoolLane:
    """Serves the draft roles of its leases; a pass takes `host_s` more for every role in it."""

    def __init__(self, clock: VirtualClock, cost: PassCost, merging: Merging, host_s: float = 0.0) -> None:
        self.busy_s = 0.0
        self.num_rows = 0
        self.num_passes = 0
        self._clock = clock
        self._cost = cost
        self._merging = merging
        self._called: list[Leased] = []
        self._has_read = False
        self._host_s = host_s
        self._leases: list[Leased] = []
        self._is_resting = True
        self._turn = 0  # the lease whose work is looked at first
        self._num_wakes = 0

    def open(self, lease: Leased) -> None:
        self._leases.append(lease)

    def close(self, lease: Leased) -> None:
        """Its records and passes are dropped; a pass under way goes on without it."""
        self._leases.remove(lease)

    def receive(self, lease: Leased, record: Any) -> None:
        lease.inbox.append(record)
        self._num_wakes += 1
        if self._is_resting:
            self._is_resting = False
            self._clock.at(self._clock.now, STEP, self._step)  # after all that arrives at this instant

    def _step(self) -> None:
        """One pass, or the rest until a record or a pause ends."""
        now = self._clock.now
        working = self._working(now)
        if not working:
            self._rest(now)
            return
        rows = sum([lease.work.passes[0][0] for lease in working if lease.work is not None])
        context = sum([lease.work.passes[0][1] for lease in working if lease.work is not None])
        seconds = self._cost(rows, context) + self._host_s * len(working)
        self.busy_s += seconds
        self.num_rows += rows
        self.num_passes += 1
        for lease in working:
            assert lease.work is not None
            own, _ = lease.work.passes.popleft()
            lease.work.num_done += 1
            lease.log.beside = rows - own
            lease.busy_s += seconds * own / max(1, rows)
        self._clock.at(now + seconds, STEP, lambda: self._end_pass(working))

    def _end_pass(self, working: list[Leased]) -> None:
        for lease in working:
            if lease in self._leases:
                self._deliver(lease, self._clock.now)
        self._step()

    def _working(self, now: float) -> list[Leased]:
        """The leases whose next pass is taken now; what takes no pass is answered on the way."""
        match self._merging:
            case Merging.passes:
                return [lease for lease in self._leases if self._has_pass(lease, now)]
            case Merging.calls:
                return self._call(now)
        order = [*self._leases[self._turn :], *self._leases[: self._turn]]
        begun = next((lease for lease in order if lease.work is not None), None)
        candidates = [begun] if begun is not None else sorted(order, key=lambda lease: not lease.inbox)
        chosen = next((lease for lease in candidates if self._has_pass(lease, now)), None)
        if chosen is None:
            return []
        self._turn = (self._leases.index(chosen) + 1) % len(self._leases)
        return [chosen]

    def _call(self, now: float) -> list[Leased]:
        """The call under way until it has ended, else all orders that wait, else a part of a text and a step of all in
        turns. A record that takes no pass is answered at once."""
        waiting = [lease for lease in self._leases if lease.inbox or lease.work is not None]
        waiting = [lease for lease in waiting if self._has_pass(lease, now)]
        self._called = [lease for lease in self._called if lease in waiting and lease.is_at(_Kind.order)]
        self._called = self._called or [lease for lease in waiting if lease.is_at(_Kind.order)]
        if self._called:
            return self._called
        readings = [lease for lease in waiting if lease.is_at(_Kind.reading)]
        if readings and not self._has_read:
            self._has_read = True
            return readings[:1]
        self._has_read = False
        return [one for one in self._leases if one not in readings and self._has_pass(one, now)] or readings[:1]

    def _has_pass(self, lease: Leased, now: float) -> bool:
        while lease.work is None:
            if not self._begin(lease, now):
                return False
            self._deliver(lease, now)
        return True

    def _begin(self, lease: Leased, now: float) -> bool:
        """Let the role answer its next record or take a step of draft-ahead; False if it has nothing to do."""
        role, log = lease.role, lease.log
        lease.time.now, log.passes = now, []
        kind = _Kind.step
        if lease.inbox:
            drafts = any(order.num_draft_tokens and order.prefetched is None for order in lease.inbox[0].orders)
            kind = _Kind.order if drafts else _Kind.reading
            answers = self._answers(lease)
            records = deque((len(log.passes), answer) for answer in answers)
        elif role.wants_work:
            pause_s = role.pause_s()
            records = deque(self._preview(role, log, last=pause_s > 0))
            if pause_s <= 0:
                role.work(role.width())
                if not role.wants_work:
                    records += self._preview(role, log, last=True)
            elif not records:
                return False
        else:
            return False
        lease.work = _Work(kind, deque(log.passes), records, started=now)
        return True

    @staticmethod
    def _answers(lease: Leased) -> Iterator[Any]:
        return lease.role.answer(lease.inbox.popleft())

    @staticmethod
    def _preview(role: DraftRole, log: PassLog, *, last: bool) -> Iterator[tuple[int, Any]]:
        preview = role.preview(last=last)
        if preview is not None:
            yield len(log.passes), preview

    def _deliver(self, lease: Leased, now: float) -> None:
        """Send what is due after the passes that were taken."""
        work = lease.work
        assert work is not None
        while work.records and work.records[0][0] <= work.num_done:
            _, record = work.records.popleft()
            if isinstance(record, ProposalBatch):  # the role took its passes for done
                record = replace(record, started=work.started, finished=now)
                work.started = now
            lease.send(record, now)
        if not work.passes:
            lease.work = None

    def _rest(self, now: float) -> None:
        self._is_resting = True
        self._num_wakes += 1
        wake = self._num_wakes
        pauses = [lease.role.pause_s() for lease in self._leases if lease.role.wants_work]
        if pauses:
            self._clock.at(now + max(min(pauses), 1e-5), STEP, lambda: self._wake(wake))

    def _wake(self, wake: int) -> None:
        """The pause ended, unless a record did."""
        if wake == self._num_wakes and self._is_resting:
            self._is_resting = False
            self._step()
