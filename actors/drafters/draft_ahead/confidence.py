"""How far a drafter's own probabilities are right about the target, learned from verdicts.

A draft model says how likely its first choice is; what counts for planning is how likely the target keeps it, and that
differs: a greedy target keeps the first choice of a hesitant drafter far more often than the drafter says. One number,
a shift of the log-odds, is fitted online so that what is expected and what is kept agree. It orders work only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_RATE = 0.1
"""Step of the fit per observed token: some ten rounds settle it."""
_LIMIT = 6.0
_TINY = 1e-9


class ConfidenceCalibration:
    """Log-odds `shift` of the first choice; 0 believes the drafter."""

    def __init__(self) -> None:
        self.shift = 0.0

    def adjust(self, log_probs: Sequence[float]) -> list[float]:
        """Log-probabilities of a node's children, first choice first, as they are to be expected; the rest shrinks."""
        first = min(max(math.exp(log_probs[0]), _TINY), 1 - _TINY)
        kept = 1 / (1 + (1 - first) / first * math.exp(-self.shift))
        rest = math.log((1 - kept) / (1 - first)) if kept < 1 else -math.inf
        return [math.log(kept), *(log_prob + rest for log_prob in log_probs[1:])]

    def learn(self, expected: float, *, kept: bool) -> None:
        """The target has kept or refused a first choice that was expected with this probability."""
        self.shift = min(max(self.shift + _RATE * (kept - expected), -_LIMIT), _LIMIT)
