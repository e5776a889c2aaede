"""When a chain of draft tokens ends: rules that decide after every token whether another one is drafted.

Beside the ordered length (`actors/policy/draft_length.py`, value per cost), a drafter may end a chain by itself:

- `ThresholdRule`: while the chance that some drafted token is rejected, 1 - a_1 a_2 ... a_i, is at most a threshold.
  a_i is the drafter's own probability of its token, or what a head that was trained for it predicts before the token is
  drawn (DSpark), corrected by the verdicts so far. SpecDec++ (arXiv 2405.19715) shows that a threshold on this chance
  is the best rule.
- `ThompsonRule`: with the probability that a coin shows which is drawn from the posterior of the request's acceptance,
  Beta(1 + accepted, 1 + rejected): EESD (arXiv 2406.03853). It needs no probability of the drafter.
- `ProbabilityRule`: while the drafter's own probability of its token is at least xi: a given one, as Kangaroo's second
  early exit (arXiv 2404.18911), or one that is steered to where nine of ten drafted tokens are accepted: Draft & Verify
  (arXiv 2309.08168), section 3.3.
- `GapRule`: while the lead of the likeliest token over the second is one that right tokens have rather than wrong ones,
  by two Beta distributions fitted to the verdicts: the exit rule of FREE (arXiv 2310.05424).

A rule sees the tokens that were kept, through their probabilities, and none that is still to be drawn: the token that
ends a chain stays part of it. So every rule is exact under the ratio tests; dropping that token would not be, as the
rule of `priced_chains.py` does for the coupled one. Knows no model; its random numbers follow from the step of the
draft, so they are the same on every rank.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from actors.drafters.draft_ahead.confidence import ConfidenceCalibration
from actors.drafters.model.beta_mixture import BetaMixture
from actors.policy.estimators import Ewma

Kept = TypeVar("Kept")


class ChainRule(ABC, Generic[Kept]):
    """`update` follows the last `continues` of a draft, before the next draft of the request. What a rule keeps of a
    request is in `_requests`, until that ends."""

    reads_gaps = False
    """Whether it is given, in place of log-probabilities, the gap between the two likeliest tokens of each place."""
    reads_leads = False
    """Whether it is given, in place of log-probabilities, by how much each token won over the second, in nats, noise
    included."""

    def __init__(self) -> None:
        self._requests: dict[int, Kept] = {}

    def begin(self, request_id: int, *, samples: bool, least_chance: float) -> None:
        """A draft begins, of a greedy request or one that samples. A token that is accepted less often than
        `least_chance` is not worth a row of the target's pass."""

    def num_dropped(self, request_id: int) -> int:
        """Tokens at the end of the request's chain that are not proposed."""
        return 0

    @abstractmethod
    def continues(self, request_id: int, step: int, log_probs: Sequence[float]) -> bool:
        """Whether to draft another token after these, given by their log-probabilities, the drafter's own or predicted,
        or by their gaps; `step` numbers the draft."""

    @abstractmethod
    def update(self, request_id: int, num_accepted: int) -> None:
        """The target accepted so many tokens of the last draft of this request."""

    def release(self, request_id: int) -> None:
        """The request ended."""
        self._requests.pop(request_id, None)


_SPECDEC = 0.3
_FREE = 0.6
"""Chances of a rejected token at which a chain ends, as published (FREE: a token is right with 0.4)."""


class ThresholdRule(ChainRule[list[float]]):
    """Ends a chain whose tokens are all accepted with a probability below 1 - `threshold`, 0 for the published one."""

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self._least = 1 - (threshold or _SPECDEC)
        self._confidence = ConfidenceCalibration()

    def continues(self, request_id: int, step: int, log_probs: Sequence[float]) -> bool:
        chances = [math.exp(self._confidence.adjust([log_prob])[0]) for log_prob in log_probs]
        self._requests[request_id] = chances
        return math.prod(chances) >= self._least

    def update(self, request_id: int, num_accepted: int) -> None:
        for place, expected in enumerate(self._requests.pop(request_id, ())[: num_accepted + 1]):
            self._confidence.update(expected, kept=place < num_accepted)


_MEMORY = 0.95
"""Share that the acceptance of a request keeps at every draft: about the last 20 drafts count."""


@dataclass(slots=True)
class _Posterior:
    """Accepted and rejected tokens of a request, and the length of its last draft."""

    accepted: Ewma = field(default_factory=lambda: Ewma(_MEMORY))
    rejected: Ewma = field(default_factory=lambda: Ewma(_MEMORY))
    length: int = 0


class ThompsonRule(ChainRule[_Posterior]):
    """Draws theta ~ Beta(1 + accepted, 1 + rejected) after every token, and goes on with probability theta."""

    def continues(self, request_id: int, step: int, log_probs: Sequence[float]) -> bool:
        known = self._requests.setdefault(request_id, _Posterior())
        known.length = len(log_probs)
        draw = random.Random(f"{step} {len(log_probs)}")
        return draw.random() < draw.betavariate(1 + known.accepted.total, 1 + known.rejected.total)

    def update(self, request_id: int, num_accepted: int) -> None:
        known = self._requests.get(request_id)
        if known is not None and known.length:
            known.accepted.update(num_accepted)
            known.rejected.update(num_accepted < known.length)
            known.length = 0


_FIRST_XI = 0.6
_STEP = 0.01
_WANTED = 0.9
_SMOOTH = 0.5
_KEPT = 0.9
"""Draft & Verify: threshold at the start, its step, the acceptance it is steered to, and how much of the past counts in
that acceptance and in the threshold."""


class ProbabilityRule(ChainRule[tuple[int, bool]]):
    """Ends a chain with the first token that the drafter gives a probability below `xi`, one for all requests: the
    `fixed` one, or for 0 one that follows acceptance.

    A draft that was not ended by this rule does not move `xi`: it says nothing about where drafts should end.
    """

    def __init__(self, fixed: float = 0.0) -> None:
        super().__init__()
        self.xi = fixed or _FIRST_XI
        self._is_fixed = fixed > 0
        self._accepted = Ewma(_SMOOTH, mean=_WANTED, weight=1 / (1 - _SMOOTH))

    def continues(self, request_id: int, step: int, log_probs: Sequence[float]) -> bool:
        goes_on = log_probs[-1] >= math.log(self.xi)
        self._requests[request_id] = len(log_probs), not goes_on
        return goes_on

    def update(self, request_id: int, num_accepted: int) -> None:
        length, by_rule = self._requests.pop(request_id, (0, False))
        if not length:
            return
        self._accepted.update(min(num_accepted, length) / length)
        if by_rule and not self._is_fixed:
            moved = self.xi + (_STEP if self._accepted.mean < _WANTED else -_STEP)
            self.xi = min(max(_KEPT * self.xi + (1 - _KEPT) * moved, _STEP), 1.0)


class GapRule(ChainRule[list[float]]):
    """Ends a chain with the first token whose gap says that it is wrong with a chance above `threshold`, 0 for the
    published one.

    One mixture serves all requests. The token with the narrow gap stays part of the draft, so narrow gaps go on being
    measured.
    """

    reads_gaps = True

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self._least_right = 1 - (threshold or _FREE)
        self._mixture = BetaMixture()
        self.least_gap = self._mixture.threshold(self._least_right)

    def continues(self, request_id: int, step: int, log_probs: Sequence[float]) -> bool:
        self._requests[request_id] = list(log_probs)
        return log_probs[-1] >= self.least_gap

    def update(self, request_id: int, num_accepted: int) -> None:
        tested = self._requests.pop(request_id, [])[: num_accepted + 1]
        for place, gap in enumerate(tested):
            self._mixture.update(gap, is_right=place < num_accepted)
        if tested:
            self.least_gap = self._mixture.threshold(self._least_right)
