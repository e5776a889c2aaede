"""`drafter.lengths=auto`: how many tokens each level of a cascade hands up, chosen by measured costs and acceptance.

Every window of drafts the walltime of all lengths within the configured ones is predicted from what was measured, and
the best are used in the next window; now and then a window runs at full length, so that a level which is not asked any
more can prove itself again. Counts and seconds only; knows no model and no token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from actors.messages import LevelWork
from actors.pipelines.walltime import LevelCost, best_lengths, measured_cost

WINDOW = 12
"""Drafts between two choices."""
PROBE_EVERY = 8
"""Windows from one at full length to the next; the first is one."""
_MEMORY = 0.7


@dataclass(slots=True)
class _Seen:
    """Decaying sums over the last windows."""

    num_passes: float = 0.0
    busy_s: float = 0.0
    num_drafts: float = 0.0
    num_draft_tokens: float = 0.0
    num_accepted_tokens: float = 0.0


class LengthControl:
    """`names` and `bounds` of the levels, the cheapest first; `drafts_at_once` says that the first is a lookup.

    `agree` makes the choice of the first rank everybody's.
    """

    def __init__(
        self,
        names: Sequence[str],
        bounds: Sequence[int],
        *,
        drafts_at_once: bool,
        agree: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda lengths: lengths,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lengths = tuple(bounds)
        self._bounds = tuple(bounds)
        self._seen = {name: _Seen() for name in names}
        self._at_once = drafts_at_once
        self._agree = agree
        self._clock = clock
        self._away_s = 0.0
        self._left_at: float | None = None
        self._num_orders = 0

    def ordered(self) -> None:
        """A draft is wanted: since the last one was sent, the target has verified."""
        if self._left_at is not None:
            away = self._clock() - self._left_at
            self._away_s = away if not self._away_s else _MEMORY * self._away_s + (1 - _MEMORY) * away
        self._num_orders += 1
        if self._num_orders % WINDOW == 0:
            window = self._num_orders // WINDOW
            probes = window % PROBE_EVERY == 0
            self.lengths = self._agree(self._bounds if probes else self.choose())
            for seen in self._seen.values():
                for name in seen.__slots__:
                    setattr(seen, name, _MEMORY * getattr(seen, name))

    def answered(self) -> None:
        self._left_at = self._clock()

    def saw(self, work: Iterable[LevelWork]) -> None:
        for one in work:
            seen = self._seen[one.level]
            for name in seen.__slots__:
                setattr(seen, name, getattr(seen, name) + getattr(one, name))

    def choose(self) -> tuple[int, ...]:
        """The lengths that what was seen speaks for; as configured while something was never seen."""
        costs = []
        for place, seen in enumerate(self._seen.values()):
            if not (seen.num_passes and seen.num_drafts):
                if place == len(self._seen) - 1 or not seen.num_passes:
                    return self._bounds
                costs.append(LevelCost(seen.busy_s / seen.num_passes, 0.0, 0, drafts_at_once=True))
                continue
            costs.append(measured_cost(seen, 0, is_first=place == 0, drafts_at_once=place == 0 and self._at_once))
        return best_lengths(costs, self._away_s, self._bounds)
