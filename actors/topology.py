"""The levels of a cascade: what a user may choose of them, which role plays which, and who speaks to whom.

The target listens to `draft`, which plays the last level; `draft2` plays the one before it, and so on downwards. A
level without a model lives with the one it drafts for. With `drafter.placement=together` `draft` plays them all.
Standard library only.
"""

from __future__ import annotations

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelsPlacement
from actors.drafters.config import DrafterConfig

TOP = "draft"


def level_roles(drafter: DrafterConfig) -> dict[str, range]:
    """Role -> its levels, from the one the target listens to downwards; a drafter without levels is one role."""
    if not isinstance(drafter, CascadeDrafterConfig):
        return {TOP: range(1)}
    count = len(drafter.levels)
    if drafter.placement is LevelsPlacement.together:
        return {TOP: range(count)}
    ends = [i + 1 for i, level in enumerate(drafter.levels) if level.models()]
    starts = [0, *ends[:-1]]
    spans = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    return {role_name(place): span for place, span in enumerate(reversed(spans))}


def role_name(place: int) -> str:
    """The role `place` levels below the one the target listens to."""
    return TOP if place == 0 else f"{TOP}{place + 1}"


def role_beneath(role: str) -> str:
    return role_name(_place(role) + 1)


def role_above(role: str) -> str | None:
    """Whom a role drafts for, None if that is the target."""
    return role_name(_place(role) - 1) if _place(role) else None


def drafts(identity: str) -> bool:
    """Whether tokens are made without this one too: plainly."""
    return identity.startswith(TOP)


def _place(role: str) -> int:
    return int(role.removeprefix(TOP) or 1) - 1
