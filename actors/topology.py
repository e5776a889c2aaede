"""The levels of a cascade: what a user may choose of them, which role plays which, and who speaks to whom.

The target listens to `draft`, which plays the last level; `draft2` plays the one before it, and so on downwards. A
level without a model lives with the one it drafts for. With `drafter.placement=together` `draft` plays them all.
Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from actors.options import DrafterConfig, ModelDrafterConfig

TOP = "draft"


class LevelLengths(StrEnum):
    """Who decides how many tokens the levels of a cascade hand up."""

    fixed = "fixed"
    auto = "auto"


class LevelsPlacement(StrEnum):
    """Whether the levels of a cascade share their ranks."""

    together = "together"
    separate = "separate"


@dataclass(frozen=True, slots=True)
class CascadeDrafterConfig(DrafterConfig):
    """Drafters that draft for each other: every level verifies the drafts of the one before it."""

    name: str = "cascade"
    """Set by the choice `drafter=`."""
    levels: list[Any] = field(default_factory=lambda: [{"name": "ngram", "num_draft_tokens": 3}, "model"])
    """The cheapest first; each a family's name or its keys, as `{name: model, path: DIR, num_draft_tokens: 4}`. The
    first may be of any family, the others are models. `num_draft_tokens`: what a level hands to the next at a time; 0 =
    it passes on what the one before it says, as if it were not there."""
    num_draft_tokens: int = 0
    """Draft tokens a round, at most; 0 = those of the last level, its tail and `merge`."""
    tails: list[int] = field(default_factory=list)
    """For each level, tokens that the one before it adds unverified behind the level's own; empty = none."""
    lengths: LevelLengths = LevelLengths.fixed
    """fixed: `num_draft_tokens` as given; auto: at most so many, and 0 of a level that does not pay, be it the last:
    the best of all cascades that can be made of the levels, by measured costs and acceptance. auto needs
    drafter.placement=together, pipeline=sync, and neither tails nor merge."""
    merge: int = 0
    """Draft tokens of the last level but one that are added beside the last level's, where the two differ."""
    placement: LevelsPlacement = LevelsPlacement.together
    """together: all levels on the last one's ranks, in turn; separate: each model on ranks of its own, so that, in an
    asynchronous pipeline, it drafts while the next one verifies."""

    def __hash__(self) -> int:
        return hash(repr(self))  # the lists of a choice that was not checked yet have no hash of their own

    @property
    def ranks(self) -> int:
        """Ranks that share the models."""
        return self.levels[-1].ranks

    @property
    def device(self) -> str:
        return self.levels[-1].device

    def tail(self, level: int) -> int:
        return self.tails[level] if self.tails else 0


def checkpoints(drafter: DrafterConfig) -> list[str]:
    """Paths of the models a drafter needs."""
    if isinstance(drafter, CascadeDrafterConfig):
        return [path for level in drafter.levels for path in checkpoints(level)]
    return [drafter.path] if isinstance(drafter, ModelDrafterConfig) else []


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


def drafts(identity: str) -> bool:
    """Whether tokens are made without this one too: plainly."""
    return identity.startswith(TOP)


def _place(role: str) -> int:
    return int(role.removeprefix(TOP) or 1) - 1
