"""The roles of a drafter: which role runs which levels of a cascade, and which roles exchange drafts.

Role `draft` sends its drafts to the target; it runs the last level of a cascade. `draft2` sends its drafts to `draft`
and runs the level before it, and so on. A level without a model runs on the ranks of the level after it. With
`drafter.placement=together` role `draft` runs all levels. It must not know how a level drafts.
"""

from __future__ import annotations

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelsPlacement
from actors.drafters.config import DrafterConfig

TOP = "draft"
"""The role whose drafts the target verifies."""


def level_roles(drafter: DrafterConfig) -> dict[str, range]:
    """Role -> its levels, starting with `draft`; a drafter without levels is one role."""
    if not isinstance(drafter, CascadeDrafterConfig):
        return {TOP: range(1)}
    count = len(drafter.levels)
    if drafter.placement is LevelsPlacement.together:
        return {TOP: range(count)}
    ends = [i + 1 for i, level in enumerate(drafter.levels) if level.models()]
    starts = [0, *ends[:-1]]
    spans = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    return {role_name(depth): span for depth, span in enumerate(reversed(spans))}


def role_name(depth: int) -> str:
    """The role that is `depth` roles below `draft`."""
    return TOP if depth == 0 else f"{TOP}{depth + 1}"


def child_role(role: str) -> str:
    """The role that drafts for `role`."""
    return role_name(_depth(role) + 1)


def parent_role(role: str) -> str | None:
    """The role that `role` drafts for; None if that is the target."""
    return role_name(_depth(role) - 1) if _depth(role) else None


def is_draft_role(identity: str) -> bool:
    """Whether a role or rank drafts: decoding goes on without it, plainly."""
    return identity.startswith(TOP)


def _depth(role: str) -> int:
    return int(role.removeprefix(TOP) or 1) - 1
