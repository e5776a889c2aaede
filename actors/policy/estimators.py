"""What recent rounds taught: how likely each draft token is to be kept, and what a longer draft costs.

Running estimates on counts and seconds that others measured; no clock, no decision. All forget at a fixed rate, so
they follow a text or a machine that changes, and hold a few numbers however long the engine runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MEMORY = 0.97
"""Weight of the past per observation: about the last thirty proposals or rounds count."""
_LONG_MEMORY = 0.99
_HICCUP = 2.0
"""What takes longer than so many times the mean is counted as that: it is the machine's, not the draft's."""
_HEARSAY = 0.995
"""The same for what was not observed itself but follows from its neighbours."""
_HOPE = 0.7
"""Chance of a node before anything was measured."""


class Survival:
    """P(node i of a proposal is accepted): for a chain, that its first i tokens are; by place in a tree otherwise."""

    def __init__(self, longest: int) -> None:
        self.chances = [_HOPE ** (i + 1) for i in range(longest)]
        self._weights = [0.0] * longest

    def update(self, num_offered: int, path: Sequence[int]) -> None:
        """Of nodes 1, 2, ... `num_offered` those in `path` were accepted."""
        kept = set(path)
        for i in range(num_offered):
            weight = self._weights[i] = MEMORY * self._weights[i] + 1
            self.chances[i] += ((i + 1 in kept) - self.chances[i]) / weight
            self.chances[i] = max(self.chances[i], 1e-6)
        # What was not offered slowly becomes what the nodes before it suggest, or an old opinion would never be tested.
        step = self.chances[num_offered - 1] ** (1 / num_offered)
        for i in range(num_offered, len(self.chances)):
            self._weights[i] *= _HEARSAY
            trust = min(self._weights[i] * (1 - MEMORY), 1.0) * _HEARSAY
            self.chances[i] = trust * self.chances[i] + (1 - trust) * self.chances[i - 1] * step

    def step(self, place: int) -> float:
        """P(node `place`, from 0 on, is accepted, given that the one before it is)."""
        return min(1.0, self.chances[place] / self.chances[place - 1]) if place else self.chances[0]

    def expected(self, length: int) -> float:
        """Tokens a proposal of `length` nodes brings, the target's own included."""
        return 1 + sum(self.chances[:length])


_BELIEF = 4.0
"""Steps after which a request's own record counts as much as that of all."""


@dataclass(slots=True)
class RequestAcceptance:
    """How one request fares beside the average: steps of its drafts that were accepted, and that should have been."""

    accepted: float = 0.0
    expected: float = 0.0

    def update(self, num_ordered: int, num_accepted: int, average: Survival) -> None:
        """The steps tested are those that were accepted and the one behind them."""
        self.accepted = MEMORY * self.accepted + num_accepted
        tested = range(min(num_accepted + 1, num_ordered))
        self.expected = MEMORY * self.expected + sum(average.step(place) for place in tested)

    def chance(self, average: Survival, place: int) -> float:
        """P(its node at `place`, from 1 on, is accepted)."""
        ratio = (self.accepted + _BELIEF) / (self.expected + _BELIEF)
        return average.chances[place - 1] * min(ratio, 1.25) ** place


@dataclass(slots=True)
class Line:
    """Running least squares of y on x, drawn towards a slope that is expected where x hardly varied."""

    weight: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    _var_x: float = 0.0
    _cov: float = 0.0

    def update(self, x: float, y: float) -> None:
        if self.weight > 4:
            y = min(y, _HICCUP * self.mean_y)
        self.weight = MEMORY * self.weight + 1
        share = 1 / self.weight
        off_x, off_y = x - self.mean_x, y - self.mean_y
        self.mean_x += share * off_x
        self.mean_y += share * off_y
        self._var_x = (1 - share) * (self._var_x + share * off_x * off_x)
        self._cov = (1 - share) * (self._cov + share * off_x * off_y)

    def slope(self, expected: float, stiffness: float) -> float:
        """`stiffness` is the variance of x at which measurement and expectation weigh the same."""
        return max(0.0, (self._cov + stiffness * expected) / (self._var_x + stiffness))


@dataclass(slots=True)
class Rate:
    """Tokens per second of recent rounds of one kind: about the last hundred."""

    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0

    def update(self, num_tokens: int, seconds: float) -> None:
        if self.weight > 4:
            seconds = min(seconds, _HICCUP * self.seconds / self.weight)
        self.tokens = _LONG_MEMORY * self.tokens + num_tokens
        self.seconds = _LONG_MEMORY * self.seconds + seconds
        self.weight = _LONG_MEMORY * self.weight + 1

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


_STIFFNESS = 0.1
"""Variance of draft lengths at which their measured cost and the expected one weigh the same."""


@dataclass(slots=True)
class RoundCosts:
    """Seconds of a round with speculation as a function of draft length.

    Two lines: the time in which the target does not work, against the longest draft (drafting, messages, waiting), and
    the target's pass, against the mean draft. Whether drafting is hidden behind the target then shows by itself.
    """

    gap: Line = field(default_factory=Line)
    verify: Line = field(default_factory=Line)
    draft_s: Line = field(default_factory=Line)

    def update(self, longest: int, mean: float, seconds: float, verify_s: float, draft_s: float) -> None:
        self.gap.update(longest, max(0.0, seconds - verify_s))
        self.verify.update(mean, verify_s)
        self.draft_s.update(longest, draft_s)

    def rates(self, plain_verify_s: float | None) -> tuple[float, float]:
        """Seconds that one more draft token for everybody costs: while drafting, and in the target's pass."""
        drafted = self.draft_s.mean_y / self.draft_s.mean_x if self.draft_s.mean_x else 0.0
        read = 0.0
        if plain_verify_s is not None and self.verify.mean_x:
            read = max(0.0, self.verify.mean_y - plain_verify_s) / self.verify.mean_x
        return self.gap.slope(drafted, _STIFFNESS), self.verify.slope(read, _STIFFNESS)

    def seconds(self, length: int, rates: tuple[float, float]) -> float:
        """Of a round in which everybody gets a draft of this length."""
        gap = self.gap.mean_y + (length - self.gap.mean_x) * rates[0]
        verify = self.verify.mean_y + (length - self.verify.mean_x) * rates[1]
        return max(0.0, gap) + max(0.5 * self.verify.mean_y, verify)
