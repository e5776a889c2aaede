"""How many outcomes of a verdict draft-ahead continues in one pass.

A pass that continues more outcomes is likelier to contain the actual one, and slower, so each outcome has fewer tokens
when the verdict comes. The cost of a row is measured: next to nothing where a device waits for memory, a good part of a
pass on a CPU. Works on probabilities and seconds of the caller; influences speed only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.policy.estimators import LinearFit

_KNOWN = 12.0
"""Weight of measured passes from which on their cost decides."""
_FIRST_WIDTH = 4
"""Width until then."""
_STIFFNESS = 0.5
"""Variance of rows at which their measured cost weighs as much as the prior, that they are free."""


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of each pass of a step of draft-ahead, 0 if there was none; `refreshed`: it also fed committed text
    again."""

    num_rows: int = 0
    refreshed: bool = False
    num_passes: int = 1


@dataclass(slots=True)
class WidthChooser:
    """Chooses by the measured seconds of passes against their rows."""

    _passes: LinearFit = field(default_factory=LinearFit)

    def update(self, num_rows: int, seconds: float) -> None:
        self._passes.update(num_rows, seconds)

    def width(self, outcomes: Sequence[Sequence[float]], length: int, time_s: float, widest: int) -> int:
        """Rows for each request in one pass, at most `widest`.

        `outcomes` are the probabilities of every request's outcomes, likeliest first, `length` the tokens wanted after
        each, `time_s` the time until the verdict. The best width has the most tokens ready, weighted by their
        probability to be used: H(w) x min(length, passes that fit).
        """
        line = self._passes
        if line.weight < _KNOWN or not time_s:
            return min(widest, _FIRST_WIDTH)
        per_row = line.slope(0.0, _STIFFNESS)
        fixed_s = max(0.0, line.at(0, per_row))
        best, most, reached = 1, 0.0, 0.0
        for width in range(1, widest + 1):
            reached += sum(chances[width - 1] for chances in outcomes if len(chances) >= width)
            seconds = max(fixed_s + per_row * width * len(outcomes), 1e-9)
            ready = reached * min(length, time_s / seconds)
            if ready > most * (1 + 1e-9):
                best, most = width, ready
        return best
