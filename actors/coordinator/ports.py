"""Which kind of port a drafter has, by where it runs and what it reads. That kind alone is loaded."""

from __future__ import annotations

from actors.coordinator.port import DrafterPort
from actors.policy.policy import Policy


def open_port(
    policy: Policy,
    read_chunk: int,
    *,
    drafts: bool,
    attached: bool = False,
    bridged: bool = False,
    first_round: int = 0,
) -> DrafterPort:
    """`drafts`: there are ranks of the drafter's own, which are sent hidden states if it is `bridged`; with `attached`
    the target's ranks draft."""
    if attached:
        from actors.coordinator.attached_port import AttachedPort

        return AttachedPort(policy, first_round)
    if not drafts:
        return DrafterPort(first_round)
    if bridged:
        from actors.coordinator.bridged_port import BridgedPort

        return BridgedPort(policy, first_round, read_chunk)
    from actors.coordinator.separate_port import SeparatePort

    return SeparatePort(policy, first_round, read_chunk)
