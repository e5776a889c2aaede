"""How wide the gap between the two likeliest tokens must be for the likelier one to count as right: FREE's estimate.

Gaps of right and of wrong tokens are two Beta distributions, fitted by their moments (arXiv 2310.05424; `util/bmm.py`
of its released code). Verdicts say which of the two a gap belongs to, so no expectation step is needed. As in the
released code both count alike, however many tokens are right: a token whose gap is as usual for a right one as for a
wrong one is right with a chance of one half. Knows no draft.
"""

from __future__ import annotations

from math import lgamma, log

import numpy as np

from actors.policy.estimators import Ewma

_MEMORY = 0.99
"""About the last 100 gaps of either kind count."""
_PRIOR = 2.0
"""Gaps that the first estimates count as."""
_EDGE = 1e-4
"""Gaps are kept so far from 0 and 1, where densities may be infinite, as in the released code."""
_LEAST_VARIANCE = 0.01
"""A narrower density would say of any other gap that it cannot be."""
_GAPS = np.linspace(0.3, 0.9, 61)
"""Thresholds: the least and the largest are the released code's, which tries ten."""
_LOGS = np.stack((np.log(_GAPS), np.log1p(-_GAPS)))


class MomentFit:
    """A Beta distribution with the mean and variance of what was observed; it begins as Beta(`a`, `b`)."""

    def __init__(self, a: float, b: float) -> None:
        mean = a / (a + b)
        square = mean * (a + 1) / (a + b + 1)
        self._mean, self._square = (Ewma(_MEMORY, mean=start, weight=_PRIOR) for start in (mean, square))

    def update(self, value: float) -> None:
        value = min(max(value, _EDGE), 1 - _EDGE)
        self._mean.update(value)
        self._square.update(value * value)

    @property
    def parameters(self) -> tuple[float, float]:
        mean = self._mean.mean
        largest = mean * (1 - mean)  # of any distribution between 0 and 1
        variance = max(self._square.mean - mean * mean, min(_LEAST_VARIANCE, largest / 2))
        scale = largest / variance - 1
        return mean * scale, (1 - mean) * scale

    def log_density(self) -> np.ndarray:
        """The logarithm of the density at the gaps of the grid."""
        a, b = self.parameters
        return np.array((a - 1, b - 1)) @ _LOGS + lgamma(a + b) - lgamma(a) - lgamma(b)


class BetaMixture:
    """Begins, as the released code does, with Beta(1, 2) for wrong tokens and Beta(2, 1) for right ones."""

    def __init__(self) -> None:
        self.wrong, self.right = MomentFit(1, 2), MomentFit(2, 1)

    def update(self, gap: float, *, is_right: bool) -> None:
        (self.right if is_right else self.wrong).update(gap)

    def threshold(self, least: float) -> float:
        """The gap from which on a token is right with a chance of at least `least`, to 0.01 and between 0.3 and 0.9.

        Fitted densities may cross twice. Then it is the gap above which as many gaps of the grid lie as reach `least`,
        which is what the released code takes.
        """
        odds = self.right.log_density() - self.wrong.log_density()
        num_below = int((odds < log(least / (1 - least))).sum())
        return float(_GAPS[min(num_below, len(_GAPS) - 1)])
