"""Running estimates of acceptance and of cost: the exponentially weighted mean and line, and what is built on them.

Every running estimate of the engine is an `Ewma` or a `LinearFit`. Both forget at a fixed rate per observation, so they
follow a text or a machine that changes, and hold a few numbers however long the engine runs. No clock, no decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

MEMORY = 0.97
"""Default weight of the past per observation: about the last 30 observations count."""
OUTLIER = 2.0
"""A time above this many means is counted as this many: the machine paused, the cost did not change."""
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

    def decay(self, share: float) -> None:
        """Keep the mean, but only this `share` of its weight against observations to come."""
        self.weight *= share

    @property
    def total(self) -> float:
        return self.mean * self.weight


@dataclass(slots=True)
class LinearFit:
    """Exponentially weighted least squares of y on x, with a prior for the slope where x hardly varied."""

    memory: float = MEMORY
    weight: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    _var_x: float = 0.0
    _cov: float = 0.0

    def update(self, x: float, y: float) -> None:
        if self.weight > _CLAMP_FROM:
            y = min(y, OUTLIER * self.mean_y)
        self.weight = self.memory * self.weight + 1
        share = 1 / self.weight
        off_x, off_y = x - self.mean_x, y - self.mean_y
        self.mean_x += share * off_x
        self.mean_y += share * off_y
        self._var_x = (1 - share) * (self._var_x + share * off_x * off_x)
        self._cov = (1 - share) * (self._cov + share * off_x * off_y)

    def slope(self, prior: float, stiffness: float) -> float:
        """Slope, at least 0; `stiffness` is the variance of x at which measurement and `prior` weigh the same."""
        return max(0.0, (self._cov + stiffness * prior) / (self._var_x + stiffness))

    def at(self, x: float, slope: float) -> float:
        """y at `x` on the line of this `slope` through the means."""
        return self.mean_y + (x - self.mean_x) * slope


# --- acceptance -------------------------------------------------------------------------------------------------------

_FIRST_CHANCE = 0.7
"""Acceptance per draft token that is expected before anything was measured."""
_LEAST_CHANCE = 1e-6
_UNOFFERED_DECAY = 0.995
"""Weight that the estimate of a node keeps in each round that did not offer the node."""


class Survival:
    """P(node i of a proposal is accepted): for a chain, that its first i tokens are; by place in a tree otherwise."""

    def __init__(self, longest: int, like: Survival | None = None, weight: float = 0.0) -> None:
        """`weight`: observations that the first estimates, those of `like`, count as."""
        means = like.chances if like is not None else [_FIRST_CHANCE ** (i + 1) for i in range(longest)]
        self._places = [Ewma(mean=mean, weight=weight) for mean in means]

    @property
    def chances(self) -> list[float]:
        return [place.mean for place in self._places]

    def update(self, num_offered: int, path: Sequence[int]) -> None:
        """Of nodes 1, 2, ... `num_offered` those in `path` were accepted."""
        places = self._places
        for i in range(num_offered):
            places[i].update(i + 1 in path)
            places[i].mean = max(places[i].mean, _LEAST_CHANCE)
        # A place that was not offered drifts towards the extrapolation from the places before it; else an estimate from
        # an earlier text would keep drafts short for ever.
        step = places[num_offered - 1].mean ** (1 / num_offered)
        for i in range(num_offered, len(places)):
            place = places[i]
            place.weight *= _UNOFFERED_DECAY
            kept = min(place.weight * (1 - place.memory), 1.0) * _UNOFFERED_DECAY
            place.mean = kept * place.mean + (1 - kept) * places[i - 1].mean * step

    def expected_accepted(self, num_tested: int) -> float:
        """Sum over the first `num_tested` nodes of P(the node is accepted | the one before it is)."""
        total, before = 0.0, 1.0
        for place in self._places[:num_tested]:
            total += min(1.0, place.mean / before)
            before = place.mean
        return total

    def expected(self) -> list[float]:
        """Tokens of a target pass over a proposal of 0, 1, 2, ... nodes, the target's own token included."""
        return list(accumulate(self.chances, initial=1.0))


_AVERAGE_STEPS = 4.0
"""Draft tokens tested after which a request's own acceptance weighs as much as the average of all requests."""
_MOST_OVER_AVERAGE = 1.25


@dataclass(slots=True)
class RequestAcceptance:
    """One request against the average: draft tokens of it that were accepted, and that the average expects to be."""

    accepted: Ewma = field(default_factory=Ewma)
    expected: Ewma = field(default_factory=Ewma)

    def update(self, num_ordered: int, num_accepted: int, average: Survival) -> None:
        """The tokens tested are the accepted ones and the first rejected one."""
        self.accepted.update(num_accepted)
        self.expected.update(average.expected_accepted(min(num_accepted + 1, num_ordered)))

    def ratio(self) -> float:
        """Acceptance per draft token, relative to the average."""
        ratio = (self.accepted.total + _AVERAGE_STEPS) / (self.expected.total + _AVERAGE_STEPS)
        return min(ratio, _MOST_OVER_AVERAGE)


# --- cost -------------------------------------------------------------------------------------------------------------

_RATE_MEMORY = 0.99


@dataclass(slots=True)
class Rate:
    """Tokens per second of recent rounds of one kind: about the last hundred."""

    tokens: Ewma = field(default_factory=lambda: Ewma(_RATE_MEMORY))
    seconds: Ewma = field(default_factory=lambda: Ewma(_RATE_MEMORY, OUTLIER))

    def update(self, num_tokens: float, seconds: float) -> None:
        self.tokens.update(num_tokens)
        self.seconds.update(seconds)

    def decay(self, share: float) -> None:
        """Keep the means, but only this `share` of their weight against rounds to come."""
        self.tokens.decay(share)
        self.seconds.decay(share)

    @property
    def num_rounds(self) -> float:
        """Decayed number of rounds that were measured."""
        return self.tokens.weight

    @property
    def per_s(self) -> float:
        return self.tokens.mean / self.seconds.mean if self.seconds.mean else 0.0


_LENGTH_STIFFNESS = 0.1
"""Variance of draft lengths at which their measured cost and the expected one weigh the same."""


_LEAST_VERIFY = 0.5
"""Least pass that is extrapolated to, in mean passes."""


@dataclass(slots=True)
class RoundCosts:
    """Seconds of a round with speculation as a function of draft length.

    Two lines: the time in which the target does not work, against the longest draft (drafting, messages, waiting), and
    the target's pass, against the mean draft. The slope of the first tells whether the target's pass hides drafting.
    """

    gap: LinearFit = field(default_factory=LinearFit)
    verify: LinearFit = field(default_factory=LinearFit)
    draft_s: LinearFit = field(default_factory=LinearFit)

    def update(self, longest: int, mean: float, seconds: float, verify_s: float, draft_s: float) -> None:
        self.gap.update(longest, max(0.0, seconds - verify_s))
        self.verify.update(mean, verify_s)
        self.draft_s.update(longest, draft_s)

    def per_token_s(self, plain_verify_s: float) -> tuple[float, float]:
        """Seconds that one more draft token for every request costs: outside the target's pass, and in it.

        `plain_verify_s` is the mean target pass without drafts; 0: not measured.
        """
        drafted = self.draft_s.mean_y / self.draft_s.mean_x if self.draft_s.mean_x else 0.0
        read = 0.0
        if plain_verify_s and self.verify.mean_x:
            read = max(0.0, self.verify.mean_y - plain_verify_s) / self.verify.mean_x
        return self.gap.slope(drafted, _LENGTH_STIFFNESS), self.verify.slope(read, _LENGTH_STIFFNESS)

    def seconds(self, longest: int, per_token_s: tuple[float, float]) -> list[float]:
        """Seconds of a round in which every request gets a draft of 0, 1, ... `longest` tokens."""
        gap_s, verify_s = self.gap.at(0, per_token_s[0]), self.verify.at(0, per_token_s[1])
        least_s = _LEAST_VERIFY * self.verify.mean_y
        return [
            max(0.0, gap_s + k * per_token_s[0]) + max(least_s, verify_s + k * per_token_s[1])
            for k in range(longest + 1)
        ]
