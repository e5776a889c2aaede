"""Which pool serves which cell: leases, their links, and what becomes of them when a pool is lost or comes back.

Must not know requests, or when devices are lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from actors.pool.shares import share_of
from cluster.tools.fleet.cell import MOST_POSITIONS, Cell, drafter_config
from cluster.tools.fleet.description import Fleet, Merging
from cluster.tools.fleet.pool_lane import Leased, PassLog, PoolLane
from cluster.tools.simulation.clock import ARRIVAL, LaneClock, VirtualClock
from cluster.tools.simulation.roles import ScriptedRunner, TextOf, draft_role


@dataclass(slots=True, eq=False)
class PoolSite:
    """A place for a pool in a region; `lane` is the device there now, None while it is lost."""

    region: str
    lane: PoolLane | None = None
    leases: dict[Cell, PoolLease] = field(default_factory=dict)
    lanes: list[PoolLane] = field(default_factory=list)
    """All that have been there."""


@dataclass(slots=True, eq=False)
class PoolLease:
    """A pool's service to one cell; what is on its way when it ends is dropped."""

    pool: PoolSite
    lane: PoolLane
    leased: Leased
    runner: ScriptedRunner
    is_live: bool = True


class Leasing:
    """Gives each cell the nearest pool with a place. `share`: targets for which a pool is meant."""

    def __init__(
        self, fleet: Fleet, clock: VirtualClock, text_of: TextOf, cells: Collection[Cell], share: int, merging: Merging
    ) -> None:
        self.pools: list[PoolSite] = []
        self._fleet = fleet
        self._clock = clock
        self._text_of = text_of
        self._cells = cells
        self._share = share
        self._most = max(share, fleet.drafter.most_targets) if share > 1 else 1
        self._merging = merging
        self._num_links = 0

    def start(self, pool: PoolSite) -> None:
        """A device is there: cells without a drafter get it, then some of those whose pools are far or crowded."""
        drafter = self._fleet.drafter
        pool.lane = PoolLane(self._clock, drafter.passes, self._merging, drafter.host_ms / 1e3)
        pool.lanes.append(pool.lane)
        for cell in sorted(self._cells, key=lambda cell: self._delay_s(pool, cell)):
            old = self._pool_of(cell)
            if len(pool.leases) < self._share and (old is None or self._is_worse(cell, old, pool)):
                if old is not None:
                    self._end(old, cell)
                self._begin(pool, cell)

    def serve(self, cell: Cell) -> None:
        """A cell without a drafter gets one, if a pool has a place."""
        pools = [pool for pool in self.pools if pool.lane is not None and len(pool.leases) < self._most]
        if pools:
            self._begin(min(pools, key=lambda pool: (self._delay_s(pool, cell), len(pool.leases))), cell)

    def lose(self, pool: PoolSite) -> None:
        """The device is gone; its cells do not know yet."""
        pool.lane = None
        for lease in pool.leases.values():
            lease.is_live = False
            lease.lane.close(lease.leased)

    def notice(self, pool: PoolSite) -> None:
        """The cells of a lost pool learn of it, and get others while there are places."""
        if pool.lane is not None:
            return
        cells, pool.leases = [*pool.leases], {}
        for cell in cells:
            cell.detach()
        for cell in cells:
            self.serve(cell)

    def forget(self, cell: Cell) -> None:
        """The cell is lost: its lease ends."""
        pool = self._pool_of(cell)
        if pool is not None:
            self._close(pool, cell)

    def _pool_of(self, cell: Cell) -> PoolSite | None:
        return next((pool for pool in self.pools if cell in pool.leases), None)

    def _is_worse(self, cell: Cell, old: PoolSite, new: PoolSite) -> bool:
        """Whether a cell should change pools, though its drafts then begin anew."""
        nearer = self._delay_s(new, cell) < self._delay_s(old, cell)
        less_crowded = len(old.leases) > max(self._share, len(new.leases) + 1)
        return nearer or (less_crowded and self._delay_s(new, cell) == self._delay_s(old, cell))

    def _delay_s(self, pool: PoolSite, cell: Cell) -> float:
        return self._fleet.links.delay_s(pool.region, cell.region)

    def _begin(self, pool: PoolSite, cell: Cell) -> None:
        fleet, lane = self._fleet, pool.lane
        assert lane is not None
        there, back = self._link(pool, cell), self._link(pool, cell)
        time, log = LaneClock(), PassLog(fleet.drafter.passes)
        time.now = self._clock.now
        runner = ScriptedRunner(self._text_of, time, log, MOST_POSITIONS)
        role = draft_role(fleet.pipeline, drafter_config(fleet), runner, time, adapts=fleet.adaptive)

        def answer(record: Any, sent: float) -> None:
            back(sent, lambda: cell.lane.queue(record) if lease.is_live else None)

        def order(record: Any) -> None:
            there(self._clock.now, lambda: lane.receive(lease.leased, record) if lease.is_live else None)

        lease = PoolLease(pool, lane, Leased(role, time, log, answer), runner)
        lane.open(lease.leased)
        pool.leases[cell] = lease
        self._share_slots(pool)
        cell.attach(order)

    def _share_slots(self, pool: PoolSite) -> None:
        """Gives leases equal parts, as the engine's pools do. One that has more by now adds none."""
        for lease in pool.leases.values():
            lease.runner.kv_slots = share_of(self._fleet.drafter.kv_slots, len(pool.leases))

    def _link(self, pool: PoolSite, cell: Cell) -> Callable[[float, Callable[[], None]], None]:
        """A direction of a connection: delivers calls in the order in which they were sent, as a stream of bytes would,
        after the delay and, between regions, an exponential jitter."""
        self._num_links += 1
        draw, last = random.Random(f"{self._fleet.seed} link {self._num_links}"), 0.0
        delay_s, jitter_ms = self._delay_s(pool, cell), self._fleet.links.jitter_ms
        jitters = jitter_ms > 0 and pool.region != cell.region

        def send(sent: float, deliver: Callable[[], None]) -> None:
            nonlocal last
            last = max(last, sent + delay_s + (draw.expovariate(1e3 / jitter_ms) if jitters else 0.0))
            self._clock.at(last, ARRIVAL, deliver)

        return send

    def _end(self, pool: PoolSite, cell: Cell) -> None:
        self._close(pool, cell)
        cell.detach()

    def _close(self, pool: PoolSite, cell: Cell) -> None:
        lease = pool.leases.pop(cell)
        if lease.is_live:
            lease.is_live = False
            lease.lane.close(lease.leased)
        self._share_slots(pool)
