"""Ways to use the devices of a fleet: which of them are targets, which draft, and for how many targets each.

Pure arithmetic over a description; must not know a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.tools.fleet.description import Fleet, Merging


class Drafting(StrEnum):
    """Where drafts are made."""

    plain = "plain"
    attached = "attached"
    pools = "pools"


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """Targets and pools in each region, in the order of the fleet's regions."""

    name: str
    drafting: Drafting
    num_targets: tuple[int, ...]
    num_pools: tuple[int, ...]
    targets_per_pool: int = 0
    """Targets that share one drafter; 1: each has its own."""
    merging: Merging = Merging.passes

    def num_devices(self, fleet: Fleet) -> int:
        return sum(self.num_targets) * fleet.target.ranks + sum(self.num_pools) * fleet.drafter.ranks

    def price_per_hour(self, fleet: Fleet) -> float:
        return sum(
            targets * fleet.target.ranks * region.price + pools * fleet.drafter.ranks * region.price_of_drafter
            for region, targets, pools in zip(fleet.regions, self.num_targets, self.num_pools, strict=True)
        )


def layouts(fleet: Fleet, targets_per_pool: Sequence[int]) -> Iterator[FleetLayout]:
    """Plain decoding, drafters on the target's ranks, one drafter for each target, and pools of about every given size:
    in each region its own, and all of them in the region from which the others are nearest. None comes twice."""
    num_regions = len(fleet.regions)
    nothing = (0,) * num_regions
    whole = tuple(region.devices // fleet.target.ranks for region in fleet.regions)
    yield FleetLayout("plain", Drafting.plain, whole, nothing)
    yield FleetLayout("attached", Drafting.attached, whole, nothing)
    seen = set()
    for share in dict.fromkeys((1, *targets_per_pool)):
        name = "a drafter each" if share == 1 else f"pools of {share}"
        found = [(name, *_split(fleet, range(num_regions), share))]
        if share > 1 and num_regions > 1:
            centre = _centre(fleet)
            found.append((f"{name} in {fleet.regions[centre].name}", *_split(fleet, [centre], share)))
        for named, targets, pools in found:
            if (targets, pools) not in seen and sum(pools):
                seen.add((targets, pools))
                rules = fleet.drafter.merging if share > 1 else [Merging.passes]
                for rule in rules:
                    full = f"{named}, {rule} merged" if len(rules) > 1 else named
                    yield FleetLayout(full, Drafting.pools, targets, pools, share, rule)


def _split(fleet: Fleet, homes: Sequence[int], share: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Targets and pools by region: the most targets for which the regions `homes`, each for its own if there are
    several, have pools. A pool is added once half of it is needed, so that pools are of about the asked size."""
    ranks = fleet.target.ranks
    targets = [region.devices // ranks for region in fleet.regions]
    pools = [0] * len(targets)
    for home in homes:
        devices = fleet.regions[home].devices
        while True:
            served = targets[home] if len(homes) > 1 else sum(targets)
            pools[home] = max(1, int(served / share + 0.5)) if served else 0
            if targets[home] * ranks + pools[home] * fleet.drafter.ranks <= devices or not targets[home]:
                break
            targets[home] -= 1
        if pools[home] * fleet.drafter.ranks > devices:
            pools[home] = 0
    return tuple(targets), tuple(pools)


def _centre(fleet: Fleet) -> int:
    """The region with the smallest sum of delays to the others."""
    names = [region.name for region in fleet.regions]
    return min(range(len(names)), key=lambda at: sum(fleet.links.delay_s(names[at], name) for name in names))
