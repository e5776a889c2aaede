"""Runs every layout of a fleet and ranks them by what a million tokens costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.tools.fleet.description import Fleet
from cluster.tools.fleet.layouts import layouts
from cluster.tools.fleet.simulation import FleetResult, simulate_fleet

Entry = dict[str, Any]
SERVED = 0.95
"""Share of the offered tokens from which on a layout is taken to bear the load; the rest of it is chance."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Results, the best first: layouts that bear the load at the asked speed before others, then by price."""

    fleet: Fleet
    results: tuple[FleetResult, ...]

    def is_fit(self, result: FleetResult) -> bool:
        load = self.fleet.load
        bears = result.tokens_per_s >= SERVED * result.offered_tokens_per_s
        return bears and result.slow_stream_tokens_per_s >= load.least_tokens_per_s

    def entries(self) -> list[Entry]:
        plain = next(one for one in self.results if not sum(one.layout.num_pools) and one.layout.drafting == "plain")
        names = [region.name for region in self.fleet.regions]
        return [
            {
                "layout": one.layout.name,
                "targets": dict(zip(names, one.layout.num_targets, strict=True)),
                "pools": dict(zip(names, one.layout.num_pools, strict=True)),
                "share": one.layout.targets_per_pool,
                "merging": one.layout.merging if one.layout.targets_per_pool > 1 else None,
                "bears_load": self.is_fit(one),
                "dollars_per_million": one.dollars_per_million,
                "tokens_per_dollar": one.tokens_per_dollar,
                "over_plain": one.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else None,
                **{name: value for name, value in asdict(one).items() if name != "layout"},
            }
            for one in self.results
        ]


def plan_fleet(fleet: Fleet, targets_per_pool: Sequence[int], progress: Callable[[str], None]) -> FleetPlan:
    """Simulate every layout; ValueError, one line, if none has a target."""
    candidates = [layout for layout in layouts(fleet, targets_per_pool) if sum(layout.num_targets)]
    if not candidates:
        raise ValueError("no region has devices for a target; lower target.ranks")
    results = []
    for number, layout in enumerate(candidates, 1):
        progress(f"simulating layout {number} of {len(candidates)}: {layout.name}")
        results.append(simulate_fleet(fleet, layout))
    unranked = FleetPlan(fleet, tuple(results))
    endless = float("inf")
    ranked = sorted(
        results,
        key=lambda one: (
            not unranked.is_fit(one),
            endless if one.dollars_per_million is None else one.dollars_per_million,
            -one.tokens_per_s,
        ),
    )
    return FleetPlan(fleet, tuple(ranked))
