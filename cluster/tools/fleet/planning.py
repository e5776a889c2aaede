"""Runs every layout of a fleet and ranks them by what a million tokens costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from cluster.tools.fleet.description import Fleet
from cluster.tools.fleet.layouts import Drafting, layouts
from cluster.tools.fleet.simulation import FleetResult, simulate_fleet

Entry = dict[str, Any]
SERVED = 0.95
"""Share of the offered tokens from which on a layout is taken to bear the load; the rest of it is chance."""


def bears_load(fleet: Fleet, result: FleetResult) -> bool:
    """Whether the offered tokens are served, at the asked speed."""
    bears = result.tokens_per_s >= SERVED * result.offered_tokens_per_s
    return bears and result.slow_stream_tokens_per_s >= fleet.load.least_tokens_per_s


def plan_fleet(fleet: Fleet, targets_per_pool: Sequence[int], progress: Callable[[str], None]) -> list[Entry]:
    """Simulate every layout: entries of `fleet.json`, those that bear the load at the asked speed before others, then
    by price. ValueError, one line, if none has a target."""
    candidates = [layout for layout in layouts(fleet, targets_per_pool) if sum(layout.num_targets)]
    if not candidates:
        raise ValueError("no region has devices for a target; lower target.ranks")
    results = []
    for number, layout in enumerate(candidates, 1):
        progress(f"simulating layout {number} of {len(candidates)}: {layout.name}")
        results.append(simulate_fleet(fleet, layout))
    plain = next(one for one in results if one.layout.drafting is Drafting.plain)
    entries = [_entry(fleet, one, plain.tokens_per_s) for one in results]
    endless = float("inf")

    def order(entry: Entry) -> tuple[bool, float, float]:
        price = entry["dollars_per_million"]
        return not entry["bears_load"], endless if price is None else price, -entry["tokens_per_s"]

    return sorted(entries, key=order)


def _entry(fleet: Fleet, result: FleetResult, plain_tokens_per_s: float) -> Entry:
    layout, names = result.layout, [region.name for region in fleet.regions]
    return {
        "layout": layout.name,
        "targets": dict(zip(names, layout.num_targets, strict=True)),
        "pools": dict(zip(names, layout.num_pools, strict=True)),
        "share": layout.targets_per_pool,
        "merging": layout.merging if layout.targets_per_pool > 1 else None,
        "bears_load": bears_load(fleet, result),
        "dollars_per_million": result.dollars_per_million,
        "tokens_per_dollar": result.tokens_per_dollar,
        "over_plain": result.tokens_per_s / plain_tokens_per_s if plain_tokens_per_s else None,
        **{name: value for name, value in asdict(result).items() if name != "layout"},
    }
