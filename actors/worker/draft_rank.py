"""The draft role of one rank, from its `RankSpec`, and what a drafter is built from on any rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from actors.drafters.config import DraftSetup
from actors.roles.draft import DraftRole
from actors.worker.spec import RankSpec
from parallel.comm.group import Group

if TYPE_CHECKING:
    from actors.transport.mailbox import Mailbox
    from parallel.runtime.kv_sizing import DeviceShare


def build_draft(spec: RankSpec, group: Group, mailbox: Mailbox | None) -> tuple[DraftRole, dict[str, object]]:
    """The role and what it measured; a drafter whose drafts come from ranks of another role needs the `mailbox`."""
    drafter, facts = spec.drafter.build(replace(draft_setup(spec, group), role=spec.role, mailbox=mailbox))
    return DraftRole(drafter, adapts=spec.adaptive), facts


def device_share(spec: RankSpec) -> DeviceShare | None:
    """What this rank shares its device with; None if it has it alone."""
    if spec.memory_part == 1 and not spec.neighbour_bytes:
        return None
    from parallel.runtime.kv_sizing import DeviceShare  # loads the model's modules

    return DeviceShare(spec.neighbour_bytes, spec.memory_part)


def draft_setup(spec: RankSpec, group: Group) -> DraftSetup:
    """What a drafter on this rank is built from."""
    return DraftSetup(
        spec.verify,
        spec.pipeline,
        spec.scheduler,
        group,
        spec.device,
        spec.eos_token_ids,
        target=spec.target,
        sharing=device_share(spec),
        adaptive=spec.adaptive,
    )
