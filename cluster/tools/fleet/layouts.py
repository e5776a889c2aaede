"""Ways to use the devices of a fleet: which of them are targets, which draft, and for how many targets each.

Pure arithmetic over a description; must not know a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.tools.fleet.description import Fleet


class Drafting(StrEnum):
    """Who drafts."""

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
    merges: bool = True
    """Whether a pool computes for all of its targets in one pass, or for one after the other."""

    def num_devices(self, fleet: Fleet) -> int:
        return sum(self.num_targets) * fleet.target.ranks + sum(self.num_pools) * fleet.drafter.ranks

    def price_per_hour(self, fleet: Fleet) -> float:
        return sum(
            targets * fleet.target.ranks * region.price + pools * fleet.drafter.ranks * region.price_of_drafter
            for region, targets, pools in zip(fleet.regions, self.num_targets, self.num_pools, strict=True)
        )


def layouts(fleet: Fleet, targets_per_pool: Sequence[int]) -> Iterator[FleetLayout]:
    """Plain decoding, drafters on the target's ranks, one drafter for each target, and pools of every given size: in
    each region as many as its targets need, and all of them in the region from which the others are nearest."""
    devices = [region.devices for region in fleet.regions]
    nothing = (0,) * len(devices)
    whole = tuple(count // fleet.target.ranks for count in devices)
    yield FleetLayout("plain", Drafting.plain, whole, nothing)
    yield FleetLayout("attached", Drafting.attached, whole, nothing)
    for share in dict.fromkeys((1, *targets_per_pool)):
        name = "a drafter each" if share == 1 else f"pools of {share}"
        local = tuple(_split(count, share, fleet) for count in devices)
        targets, pools = tuple(one for one, _ in local), tuple(other for _, other in local)
        yield FleetLayout(name, Drafting.pools, targets, pools, share)
        if share > 1 and len(devices) > 1:
            yield from _central(fleet, share, whole)


def _split(devices: int, share: int, fleet: Fleet) -> tuple[int, int]:
    """The most targets for which there are pools too."""
    for targets in range(devices // fleet.target.ranks, 0, -1):
        if targets * fleet.target.ranks + _needed(targets, share) * fleet.drafter.ranks <= devices:
            return targets, _needed(targets, share)
    return 0, 0


def _central(fleet: Fleet, share: int, whole: Sequence[int]) -> Iterator[FleetLayout]:
    """All pools in one region, if they fit; the others have targets alone."""
    names = [region.name for region in fleet.regions]
    centre = min(range(len(names)), key=lambda at: sum(fleet.links.delay_s(names[at], name) for name in names))
    targets, pools = list(whole), 0
    while pools < _needed(sum(targets), share):
        pools += 1
        room = fleet.regions[centre].devices - pools * fleet.drafter.ranks
        targets[centre] = max(0, room // fleet.target.ranks)
    if pools * fleet.drafter.ranks <= fleet.regions[centre].devices:
        counts = tuple(pools if at == centre else 0 for at in range(len(names)))
        yield FleetLayout(f"pools of {share} in {names[centre]}", Drafting.pools, tuple(targets), counts, share)


def _needed(targets: int, share: int) -> int:
    """Pools for so many targets."""
    return -(-targets // share)
