"""The names of a drafter's roles, which say what exchanges drafts with what.

Role `draft` sends its drafts to the target, `draft2` to `draft`, and so on; `DrafterConfig.roles` says what each runs.
It must not know how one drafts.
"""

from __future__ import annotations

TOP = "draft"
"""The role whose drafts the target verifies."""


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
