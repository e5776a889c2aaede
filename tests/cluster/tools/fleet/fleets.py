"""Small fleets for the tests of this folder."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from cluster.tools.fleet.description import Fleet, FleetLoad, Links, Losses, PoolDrafter, Region, TargetReplica
from cluster.tools.fleet.layouts import Drafting, FleetLayout

STEADY = FleetLoad(requests_per_s=100, seconds=1.0, warmup_s=0.3, prompt=[16], output=[10_000])
"""Each target has its batch all the time."""


def small_fleet(num_targets: int = 1, *, batch: int = 1, load: FleetLoad = STEADY, **changes: Any) -> Fleet:
    """One region, target passes of 15 ms on four devices, draft passes of 1.5 ms on one, lengths fixed."""
    fleet = Fleet(
        regions=[Region(name="here", devices=5 * num_targets, price=1.0)],
        target=TargetReplica(pass_ms=15.0, ranks=4, max_num_seqs=batch),
        drafter=PoolDrafter(pass_ms=1.5, longest_draft=5, fan_out=4, ahead_width=8),
        load=load,
        adaptive=False,
    )
    return structs.replace(fleet, **changes)


def two_regions(**changes: Any) -> Fleet:
    """Two regions 5 ms apart with two targets and one pool each, under a load that they can bear."""
    fleet = small_fleet(
        regions=[Region(name="east", devices=9, price=2.0), Region(name="west", devices=9, price=1.0, draft_price=0.5)],
        load=FleetLoad(requests_per_s=12, seconds=4, warmup_s=0.5, prompt=[20, 40], output=[20, 40]),
        links=Links(between_ms=5, jitter_ms=0.5),
    )
    return structs.replace(fleet, **changes)


def pooled(*num_targets: int, pools: tuple[int, ...] = (1,), share: int = 0) -> FleetLayout:
    return FleetLayout("pools", Drafting.pools, num_targets, pools, share or sum(num_targets))


LOCAL = pooled(2, 2, pools=(1, 1), share=2)
"""A layout of `two_regions` in which each region has its pool."""

BAD_LUCK = Losses(drafters_per_minute=80, targets_per_minute=40, recovery_s=0.4, detect_s=0.1)
