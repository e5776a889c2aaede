"""Runs one layout of a fleet: its cells and pools, the devices that are lost and come back, and the figures.

All randomness follows from the fleet's seed, and arrivals have their own, so layouts meet the same requests. Must not
know why a layout was chosen.
"""

from __future__ import annotations

import gc
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from actors.protocol.messages import Report, ReportOrder
from cluster.tools.fleet.cell import Cell
from cluster.tools.fleet.description import Fleet
from cluster.tools.fleet.layouts import Drafting, FleetLayout
from cluster.tools.fleet.leasing import Leasing, PoolSite
from cluster.tools.fleet.traffic import Traffic
from cluster.tools.simulation.clock import ARRIVAL, VirtualClock
from cluster.tools.simulation.language import TextSource


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Figures of one layout, from the end of the warm-up to the end; tokens are compared from the beginning on."""

    layout: FleetLayout
    num_devices: int
    dollars_per_hour: float
    tokens_per_s: float
    offered_tokens_per_s: float
    stream_tokens_per_s: float
    """Median over streams, after their first token."""
    slow_stream_tokens_per_s: float
    """Nine of ten streams are at least as fast."""
    first_token_s: float
    late_first_token_s: float
    """The 95th percentile."""
    target_busy: float
    pool_busy: float
    rows_per_draft_pass: float
    mean_acceptance_length: float
    """Tokens per target pass with a draft, its own included."""
    drafted_share: float
    """Share of the verdicts that are on a draft."""
    num_requests: int
    num_tokens: int
    num_different: int
    """Tokens that are not those of plain decoding, or missing."""
    num_waiting: int
    """Requests without a token at the end."""
    drafters_lost: int
    targets_lost: int
    num_moves: int
    num_far_moves: int
    num_preemptions: int
    """Requests that left a batch because their rows did not fit."""

    @property
    def dollars_per_million(self) -> float | None:
        """Price of the tokens that were served; None without any."""
        return 1e6 * self.dollars_per_hour / 3600 / self.tokens_per_s if self.tokens_per_s else None

    @property
    def tokens_per_dollar(self) -> float | None:
        return 3600 * self.tokens_per_s / self.dollars_per_hour if self.dollars_per_hour else None


def simulate_fleet(fleet: Fleet, layout: FleetLayout, texts: TextSource | None = None) -> FleetResult:
    """Run a layout for `load.seconds`; the requests' texts are those of the fleet's language, if none are given."""
    collects = gc.isenabled()
    gc.disable()  # half of the time goes to looking for cycles among texts and trees, which have none
    try:
        return _FleetSimulation(fleet, layout, texts or fleet.language).result()
    finally:
        if collects:
            gc.enable()


class _FleetSimulation:
    def __init__(self, fleet: Fleet, layout: FleetLayout, texts: TextSource) -> None:
        self._fleet, self._layout = fleet, layout
        self._clock = VirtualClock()
        self._cells: list[Cell] = []
        self._traffic = Traffic(fleet, self._clock, self._cells, texts)
        share = layout.targets_per_pool or 1
        self._leasing = Leasing(fleet, self._clock, self._traffic.text_of, self._cells, share, layout.merging)
        self._random = {name: random.Random(f"{fleet.seed} {name}") for name in ("drafters", "targets")}
        self._counters: Counter[str] = Counter()
        self._stopped_until: defaultdict[str, float] = defaultdict(float)
        self._target_s = 0.0  # seconds in which targets computed, in the measured time
        self._pool_s = 0.0

    def result(self) -> FleetResult:
        layout, losses = self._layout, self._fleet.losses
        for region, num_targets, num_pools in zip(
            self._fleet.regions, layout.num_targets, layout.num_pools, strict=True
        ):
            self._leasing.pools += [PoolSite(region.name) for _ in range(num_pools)]
            for _ in range(num_targets):
                self._add_cell(region.name)
        for pool in self._leasing.pools:
            self._leasing.start(pool)
        for cell in self._cells:
            if layout.drafting is Drafting.pools and not cell.has_drafter:
                self._leasing.serve(cell)
        self._traffic.schedule_arrival()
        for outage in losses.outages:
            self._clock.at(outage.at_s, ARRIVAL, partial(self._stop_region, outage.region, outage.seconds))
        self._schedule_loss("drafters", losses.drafters_per_minute * len(self._leasing.pools), self._lose_drafter)
        self._schedule_loss("targets", losses.targets_per_minute * len(self._cells), self._lose_target)
        self._clock.at(self._fleet.load.warmup_s, ARRIVAL, partial(self._mark, -1))
        self._clock.run(until=self._fleet.load.seconds)
        self._mark(1)
        self._traffic.close()
        return self._summary()

    def _mark(self, sign: int) -> None:
        """Count the time of passes so far: taken away at the begin of the measured time, added at its end."""
        lanes = [lane for pool in self._leasing.pools for lane in pool.lanes]
        self._pool_s += sign * sum([lane.busy_s for lane in lanes])
        self._target_s += sign * sum([cell.busy_s for cell in self._cells])

    # --- losses -------------------------------------------------------------------------------------------------------

    def _schedule_loss(self, kind: str, per_minute: float, lose: Callable[[random.Random], None]) -> None:
        """The next loss of this kind, at random."""
        if not per_minute:
            return
        draw = self._random[kind]

        def strike() -> None:
            lose(draw)
            self._schedule_loss(kind, per_minute, lose)

        self._clock.at(self._clock.now + draw.expovariate(per_minute / 60), ARRIVAL, strike)

    def _lose_drafter(self, draw: random.Random) -> None:
        """One of the places, whether there is a device or not: the rate is that of each device."""
        pool = draw.choice(self._leasing.pools)
        if pool.lane is None:
            return
        losses, leasing, now = self._fleet.losses, self._leasing, self._clock.now
        self._counters["drafters_lost"] += 1
        leasing.lose(pool)
        self._clock.at(now + losses.detect_s, ARRIVAL, partial(leasing.notice, pool))
        back = max(losses.recovery_s, losses.detect_s)
        self._clock.at(now + back, ARRIVAL, partial(leasing.start, pool))

    def _lose_target(self, draw: random.Random) -> None:
        place = draw.randrange(sum(self._layout.num_targets))
        if place < len(self._cells):
            losses = self._fleet.losses
            self._stop_cell(self._cells[place], losses.detect_s, losses.recovery_s)

    def _stop_region(self, region: str, seconds: float) -> None:
        self._stopped_until[region] = max(self._stopped_until[region], self._clock.now + seconds)
        for cell in [cell for cell in self._cells if cell.region == region]:
            self._stop_cell(cell, self._fleet.losses.detect_s, seconds)

    def _stop_cell(self, cell: Cell, detect_s: float, recovery_s: float) -> None:
        """Its coordinator and its rows are gone: clients notice, and a successor comes later, empty."""
        self._counters["targets_lost"] += 1
        self._cells.remove(cell)
        cell.lane.is_alive = False
        self._leasing.forget(cell)
        self._keep_counters(cell)
        self._target_s += cell.busy_s if self._is_measured else 0.0
        now = self._clock.now
        self._clock.at(now + detect_s, ARRIVAL, partial(self._traffic.move, cell))
        self._clock.at(now + recovery_s, ARRIVAL, partial(self._replace, cell.region))

    def _replace(self, region: str) -> None:
        if self._clock.now < self._stopped_until[region]:
            self._clock.at(self._stopped_until[region], ARRIVAL, partial(self._replace, region))
            return
        cell = self._add_cell(region)
        if self._layout.drafting is Drafting.pools:
            self._leasing.serve(cell)
        self._traffic.cell_came()

    @property
    def _is_measured(self) -> bool:
        return self._fleet.load.warmup_s <= self._clock.now <= self._fleet.load.seconds

    def _add_cell(self, region: str) -> Cell:
        cell = Cell(self._fleet, self._layout.drafting, self._clock, self._traffic, region)
        self._cells.append(cell)
        return cell

    # --- figures ------------------------------------------------------------------------------------------------------

    def _keep_counters(self, cell: Cell) -> None:
        (report,) = cell.lane.coordinator.on(ReportOrder(spans=False), self._clock.now)
        assert isinstance(report, Report)
        for name in ("num_spec_steps", "num_accepted_tokens", "num_preemptions", "num_tokens"):
            self._counters[name] += report.counters[name]

    def _summary(self) -> FleetResult:
        fleet, layout, served = self._fleet, self._layout, self._traffic.served
        for cell in self._cells:
            self._keep_counters(cell)
        seconds = fleet.load.seconds - fleet.load.warmup_s
        lanes = [lane for pool in self._leasing.pools for lane in pool.lanes]
        num_passes = sum([lane.num_passes for lane in lanes])
        count = self._counters
        steps, accepted = count["num_spec_steps"], count["num_accepted_tokens"]
        return FleetResult(
            layout=layout,
            num_devices=layout.num_devices(fleet),
            dollars_per_hour=layout.price_per_hour(fleet),
            tokens_per_s=served.num_measured / seconds,
            offered_tokens_per_s=served.num_offered / seconds,
            stream_tokens_per_s=served.median_speed,
            slow_stream_tokens_per_s=served.slow_speed,
            first_token_s=served.median_wait_s,
            late_first_token_s=served.long_wait_s,
            target_busy=self._target_s / seconds / max(1, sum(layout.num_targets)),
            pool_busy=self._pool_s / seconds / max(1, sum(layout.num_pools)),
            rows_per_draft_pass=sum([lane.num_rows for lane in lanes]) / max(1, num_passes),
            mean_acceptance_length=1 + accepted / steps if steps else 1.0,
            drafted_share=steps / max(1, count["num_tokens"] - accepted),
            num_requests=served.num_requests,
            num_tokens=served.num_tokens,
            num_different=served.num_different,
            num_waiting=served.num_waiting,
            drafters_lost=count["drafters_lost"],
            targets_lost=count["targets_lost"],
            num_moves=served.num_moves,
            num_far_moves=served.num_far_moves,
            num_preemptions=count["num_preemptions"],
        )
