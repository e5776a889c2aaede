"""The names of a drafter's roles, which say what exchanges drafts with what.

Role `draft` sends its drafts to the target, `draft2` to `draft`, and so on; `DrafterConfig.roles` says what each runs.
Where several pools lend their drafters at a time, each has a seat: `draft`, `draft@1`, and so on, side by side.
It must not know how one drafts.
"""

from __future__ import annotations

TOP = "draft"
"""The role whose drafts the target verifies."""


def role_name(depth: int) -> str:
    """The role that is `depth` roles below `draft`."""
    return TOP if depth == 0 else f"{TOP}{depth + 1}"


def seat_role(seat: int) -> str:
    """The role that has this seat."""
    return TOP if seat == 0 else f"{TOP}@{seat}"


def seat_of(role: str) -> int:
    return int(role.partition("@")[2] or 0)


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
    return int(role.partition("@")[0].removeprefix(TOP) or 1) - 1
