"""Seconds of a pass by its number of rows, a table that is interpolated, and by the text behind them.

What plans predict with, the simulator's clock advances by, and paced passes wait for. Knows no model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one pass at ascending numbers of rows; linear between them.

    Below the first point the cost is constant; above the last one the last slope goes on. Each row of KV that the
    sequences of the pass have takes `context_s` more, however many rows read it: it is read once.
    """

    points: tuple[tuple[int, float], ...]
    context_s: float = 0.0

    def __post_init__(self) -> None:
        rows = [at for at, _ in self.points]
        if not rows or rows[0] < 1 or rows != sorted(set(rows)):
            raise ValueError(f"pass cost: rows {rows} must be at least one number, ascending, from 1 on")
        if any(seconds < 0 for _, seconds in self.points) or self.context_s < 0:
            raise ValueError("pass cost: seconds must be 0 or above")

    @staticmethod
    def flat(seconds: float) -> PassCost:
        """Independent of the rows: a pass bound by reading weights."""
        return PassCost(((1, seconds),))

    @staticmethod
    def table(seconds: Mapping[int, float]) -> PassCost:
        return PassCost(tuple(sorted(seconds.items())))

    @staticmethod
    def of_ms(milliseconds: float | Mapping[int, float], context_ms: float = 0.0) -> PassCost:
        """A number for passes of any rows, or a table by rows; `context_ms` more for every 1,000 rows of KV."""
        table = milliseconds if isinstance(milliseconds, Mapping) else {1: milliseconds}
        return PassCost(tuple(sorted((rows, ms / 1e3) for rows, ms in table.items())), context_ms / 1e6)

    @property
    def context_ms(self) -> float:
        """Milliseconds for every 1,000 rows of KV."""
        return self.context_s * 1e6

    def __call__(self, rows: int, context: int = 0) -> float:
        """Seconds of so many rows, over sequences that have `context` rows of KV in all."""
        behind = self.context_s * context
        after = bisect_right(self.points, rows, key=lambda point: point[0])
        if after == 0 or len(self.points) == 1:
            return self.points[0][1] + behind
        (left, low), (right, high) = self.points[min(after, len(self.points) - 1) - 1 :][:2]
        return low + (high - low) * (rows - left) / (right - left) + behind
