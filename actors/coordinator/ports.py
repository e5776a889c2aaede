"""Which kind of port a drafter has, by where it runs and what it reads."""

from __future__ import annotations

from actors.coordinator.attached_port import AttachedPort
from actors.coordinator.bridged_port import BridgedPort
from actors.coordinator.port import DrafterPort
from actors.coordinator.separate_port import SeparatePort
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
        return AttachedPort(policy, first_round)
    if not drafts:
        return DrafterPort(first_round)
    return (BridgedPort if bridged else SeparatePort)(policy, first_round, read_chunk)
