"""Calibration of a drafter's probabilities against the target's verdicts.

The draft model's probability of its first choice differs from the probability that the target keeps it: a greedy target
keeps the first choice of an uncertain drafter far more often. One number, a shift of the log-odds, is fitted by
stochastic gradient steps on the log-likelihood of the verdicts. It influences the order of work only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_RATE = 0.1
"""Step of the fit per observed token; it settles within some ten rounds."""
_LIMIT = 6.0
_TINY = 1e-9


class ConfidenceCalibration:
    """`shift` is added to the log-odds of the first choice; 0 keeps the drafter's probabilities."""

    def __init__(self) -> None:
        self.shift = 0.0

    def adjust(self, log_probs: Sequence[float]) -> list[float]:
        """Calibrated log-probabilities of a node's children, first choice first; the others share the rest."""
        first = min(max(math.exp(log_probs[0]), _TINY), 1 - _TINY)
        kept = 1 / (1 + (1 - first) / first * math.exp(-self.shift))
        rest = math.log((1 - kept) / (1 - first)) if kept < 1 else -math.inf
        adjusted = [log_prob + rest for log_prob in log_probs]
        adjusted[0] = math.log(kept)
        return adjusted

    def update(self, expected: float, *, kept: bool) -> None:
        """The target kept or rejected a first choice whose calibrated probability was `expected`."""
        self.shift = min(max(self.shift + _RATE * (kept - expected), -_LIMIT), _LIMIT)
