"""Running estimates of acceptance and of cost: the exponentially weighted mean and line, and what is built on them.

Every running estimate of the engine is an `Ewma` or a `LinearFit`. Both forget at a fixed rate per observation, so they
follow a text or a machine that changes, and hold a few numbers however long the engine runs. No clock, no decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from math import log2
from typing import Generic, TypeVar

_Estimate = TypeVar("_Estimate")

MEMORY = 0.97
"""Default weight of the past per observation: about the last 30 observations count."""
ROUND_MEMORY = 0.875
"""Least weight that the past keeps in a round: a large batch would else be judged by its last round alone."""
OUTLIER = 2.0
"""A time above this many means is counted as this many: the machine paused, the cost did not change."""
COMMON = 0.2
"""Share of outliers from which on they are no pauses, but waits for drafts that were not prepared."""
_CLAMP_FROM = 4.0
"""Weight from which on outliers are clamped; below it the mean is not known well enough."""


@dataclass(slots=True)
class Ewma:
    """Exponentially weighted mean: while few observations have been made, their plain average.

    `weight` is the sum of the decayed weights of the observations, at most 1 / (1 - `memory`); `total` is their decayed
    sum. A prior is a `mean` with a `weight` of its own, 0 if the first observation shall replace it. With `outlier`,
    an observation above that many means is clamped.
    """

    memory: float = MEMORY
    outlier: float = 0.0
    mean: float = 0.0
    weight: float = 0.0

    def update(self, value: float, count: float = 1.0) -> None:
        """Observe `value`, the mean of `count` observations made at once."""
        if self.outlier and self.weight > _CLAMP_FROM:
            value = min(value, self.outlier * self.mean)
        self.weight = self.memory * self.weight + count
        self.mean += (value - self.mean) * count / self.weight

    def update_round(self, values: Collection[float]) -> None:
        """Observe the requests of a round as they are: the past is forgotten with each, but by at most an eighth."""
        count = len(values)
        self.weight = max(self.memory**count, ROUND_MEMORY) * self.weight + count
        self.mean += (sum(values) - count * self.mean) / self.weight

    def decay(self, share: float) -> None:
        """Keep the mean, but only this `share` of its weight against observations to come."""
        self.weight *= share

    @property
    def total(self) -> float:
        return self.mean * self.weight


@dataclass(slots=True)
class LinearFit:
    """Exponentially weighted least squares of y on x, with a prior for the slope where x hardly varied.

    A y above `OUTLIER` times what is usual is clamped, unless such are `COMMON`.
    """

    memory: float = MEMORY
    corrects_first: bool = False
    """Whether the first observations are taken back to twice a later one: they may have been pauses."""
    weight: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    _var_x: float = 0.0
    _cov: float = 0.0
    _num_outliers: float = 0.0

    def update(self, x: float, y: float, slope: float = 0.0) -> None:
        """Observe a point; usual at `x` is what the line of this `slope` says, and at least the mean."""
        if self.mean_y > 0 and self.weight > _CLAMP_FROM:
            limit = OUTLIER * max(self.mean_y, self.at(x, slope))
            self._num_outliers = MEMORY * self._num_outliers + (y > limit)
            if self._num_outliers < COMMON / (1 - MEMORY):
                y = min(y, limit)
        elif y > 0 and self.corrects_first:
            self.mean_y = min(self.mean_y, OUTLIER * max(y, y + slope * (self.mean_x - x)))
        self.weight = self.memory * self.weight + 1
        share = 1 / self.weight
        off_x, off_y = x - self.mean_x, y - self.mean_y
        self.mean_x += share * off_x
        self.mean_y += share * off_y
        self._var_x = (1 - share) * (self._var_x + share * off_x * off_x)
        self._cov = (1 - share) * (self._cov + share * off_x * off_y)

    def decay(self, share: float) -> None:
        """Keep the line, but only this `share` of its weight against observations to come."""
        self.weight *= share

    def add(self, constant: float, slope: float = 0.0) -> None:
        """Every y grows by the constant, and by so much for each x."""
        self.mean_y += constant + slope * self.mean_x
        self._cov += slope * self._var_x

    def slope(self, prior: float, stiffness: float) -> float:
        """Slope, at least 0; `stiffness` is the variance of x at which measurement and `prior` weigh the same."""
        return max(0.0, (self._cov + stiffness * prior) / (self._var_x + stiffness))

    def weight_at(self, x: float, stiffness: float) -> float:
        """Weight of what the line says at `x`: less than its own, the farther `x` is from where it was measured."""
        off_x = x - self.mean_x
        return self.weight / (1 + off_x * off_x / (self._var_x + stiffness))

    def at(self, x: float, slope: float) -> float:
        """y at `x` on the line of this `slope` through the means."""
        return self.mean_y + (x - self.mean_x) * slope


@cache
def batch_class(num_requests: int) -> int:
    """Class of batch sizes, in steps of a half more."""
    return round(2 * log2(num_requests))


class BySize(Generic[_Estimate]):
    """An estimate for each class of batch sizes.

    A class that was never measured goes by `borrow(known, num_known, num_requests)`: what the nearest class knows, and
    the requests there and here.
    """

    def __init__(self, first: Callable[[], _Estimate], borrow: Callable[[_Estimate, float, float], _Estimate]) -> None:
        self._first, self._borrow = first, borrow
        self._by_class: dict[int, _Estimate] = {}

    def known(self, num_requests: int) -> _Estimate:
        """The estimate to go by now; until its class is measured, what the nearest class knows by then."""
        size = batch_class(num_requests)
        if (own := self._by_class.get(size)) is not None:
            return own
        nearest = min(self._by_class, key=lambda known: abs(known - size), default=None)
        if nearest is None:
            return self._first()
        return self._borrow(self._by_class[nearest], 2 ** (nearest / 2), 2 ** (size / 2))

    def measured(self, num_requests: int) -> _Estimate:
        """The estimate to be updated with a measurement."""
        size = batch_class(num_requests)
        if (own := self._by_class.get(size)) is None:
            own = self._by_class[size] = self.known(num_requests)
        return own
