"""The levels of a cascade as roles: which role plays which levels, and who speaks to whom. Standard library only.

The target listens to `draft`, which plays the last level; `draft2` plays the one before it, and so on downwards. A
level without a model lives with the one it drafts for. With `drafter.placement=together` `draft` plays them all.
"""

from __future__ import annotations

from actors.options import CascadeDrafterConfig, DrafterConfig, LevelsPlacement

TOP = "draft"


def level_roles(drafter: DrafterConfig) -> dict[str, range]:
    """Role -> its levels, from the one the target listens to downwards; a drafter without levels is one role."""
    if not isinstance(drafter, CascadeDrafterConfig):
        return {TOP: range(1)}
    count = len(drafter.levels)
    if drafter.placement is LevelsPlacement.together:
        return {TOP: range(count)}
    ends = [i + 1 for i, level in enumerate(drafter.levels) if hasattr(level, "path")]
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


def is_spared(identity: str) -> bool:
    """Whether a rank may die and nobody else need: a level beneath another, which then drafts by itself."""
    role = identity.rpartition("-")[0]
    return role.startswith(TOP) and role != TOP


def _place(role: str) -> int:
    return int(role.removeprefix(TOP) or 1) - 1
