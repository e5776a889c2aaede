"""Whose time it was: busy fractions of two lanes, and the wall time split by who was waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Shares:
    """Fractions of a window. `target + draft + exchange` is 1: while the target works the time is its own; while it
    waits and the drafter works, the drafter's; while both wait, that of links and coordinator."""

    target: float
    draft: float
    exchange: float
    draft_busy: float
    """All of the drafter's work, hidden or not."""


def split_time(target: Sequence[Interval], draft: Sequence[Interval], start: float, end: float) -> Shares:
    """Shares of [start, end]; the intervals of a lane are ascending and do not overlap."""
    target, draft, length = _clip(target, start, end), _clip(draft, start, end), end - start
    target_s, draft_s = _total(target), _total(draft)
    alone_s = draft_s - _overlap(target, draft)
    nobody_s = max(0.0, length - target_s - alone_s)
    return Shares(target_s / length, alone_s / length, nobody_s / length, draft_s / length)


def _clip(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]


def _total(intervals: Sequence[Interval]) -> float:
    return sum(b - a for a, b in intervals)


def _overlap(ones: Sequence[Interval], others: Sequence[Interval]) -> float:
    shared, i, j = 0.0, 0, 0
    while i < len(ones) and j < len(others):
        shared += max(0.0, min(ones[i][1], others[j][1]) - max(ones[i][0], others[j][0]))
        if ones[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return shared
