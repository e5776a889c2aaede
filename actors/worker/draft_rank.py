"""The draft role of one rank, from its `RankSpec`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from actors.roles.draft import DraftRole
from actors.worker.spec import RankSpec
from parallel.comm.group import Group

if TYPE_CHECKING:
    from actors.transport.mailbox import Mailbox


def build_draft(spec: RankSpec, group: Group, mailbox: Mailbox | None) -> tuple[DraftRole, dict[str, object]]:
    """The role and what it measured; a drafter whose drafts come from ranks of another role needs the `mailbox`."""
    setup = replace(spec.draft_setup(group), role=spec.role, mailbox=mailbox)
    drafter, facts = spec.drafter.build(setup)
    return DraftRole(drafter, adapts=spec.adaptive, rebuild=spec.drafter.rebuilder(setup)), facts
