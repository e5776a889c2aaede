"""Which kind of port a drafter has, by where it runs and what it reads. That kind alone is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.coordinator.port import DrafterPort
from actors.policy.policy import Policy

if TYPE_CHECKING:
    from actors.coordinator.local_drafts import LocalDrafts


def open_port(
    policy: Policy,
    read_chunk: int,
    *,
    drafts: bool,
    attached: bool = False,
    bridged: bool = False,
    num_seats: int = 1,
    first_round: int = 0,
    local_drafter: str | LocalDrafts = "none",
) -> DrafterPort:
    """`drafts`: there are ranks of the drafter's own, which are sent hidden states if it is `bridged`; with `attached`
    the target's ranks draft; of more than one of `num_seats` each is lent by a pool. With a `local_drafter` its drafts
    are not waited for."""
    if attached:
        from actors.coordinator.attached_port import AttachedPort

        return AttachedPort(policy, first_round)
    if not drafts:
        return DrafterPort(first_round)
    if bridged:
        from actors.coordinator.bridged_port import BridgedPort

        return BridgedPort(policy, first_round, read_chunk)
    if num_seats > 1:
        from actors.coordinator.pools_port import PoolsPort

        return PoolsPort(policy, first_round, read_chunk, num_seats)
    if local_drafter != "none":
        from actors.coordinator.far_port import FarPort
        from actors.coordinator.local_drafts import LocalDrafts

        local = LocalDrafts.of(local_drafter) if isinstance(local_drafter, str) else local_drafter
        return FarPort(policy, first_round, read_chunk, local)
    from actors.coordinator.separate_port import SeparatePort

    return SeparatePort(policy, first_round, read_chunk)
