"""How many draft tokens are accepted: by their place in a draft, by the class of the text, and by request.

Chances follow counts of accepted draft tokens, with exponential forgetting. Knows no seconds and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from actors.policy.estimators import ROUND_MEMORY, Ewma

_FIRST_CHANCE = 0.7
"""Acceptance per draft token that is expected before anything was measured."""
_LEAST_CHANCE = 1e-6
ACCEPTANCE_MEMORY = 0.98
"""About the last 50 drafts count, and of a large batch the last eight rounds."""
_LONG_MEMORY = 0.99
"""The same for ways to draft, which differ alike in all texts."""
_UNOFFERED_DECAY = 0.995
"""Weight that the estimate of a node keeps in each round that did not offer the node."""


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """Draft tokens that were ordered for a request in a round, and the nodes of its draft that were accepted.

    Tokens that were ordered and did not come, or not in time, count as not accepted: the order is what is chosen.
    `num_tokens` is what the pass brought the request if it verified a draft, else 0; `num_missing` of the ordered
    tokens had no row of it.
    """

    request_id: int
    num_ordered: int
    path: Sequence[int]
    num_tokens: int = 0
    num_missing: int = 0


class Survival:
    """P(node i of a proposal is accepted): for a chain, that its first i tokens are; by place in a tree otherwise."""

    def __init__(self, longest: int, like: Survival | None = None, weight: float = 0.0) -> None:
        """`weight`: observations that the first estimates, those of `like`, count as."""
        self.chances = list(like.chances) if like is not None else [_FIRST_CHANCE ** (i + 1) for i in range(longest)]
        self._weights = [weight] * len(self.chances)  # of exponentially weighted means, as in `Ewma`
        self._accepted: list[float] | None = None  # of so many tested nodes, until the chances change

    @property
    def weight(self) -> float:
        """Drafts that were observed, with forgetting."""
        return self._weights[0]

    def fade(self, share: float) -> None:
        """A round without drafts passed: keep the chances, but only this `share` of their weight."""
        self._weights = [weight * share for weight in self._weights]

    def update(self, drafts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """The drafts of a round: of nodes 1, 2, ... `num_offered` the target accepted those in `path`."""
        num_offered = max([offered for offered, _ in drafts])
        for i in range(num_offered):
            tested = [i + 1 in path for offered, path in drafts if offered > i]
            self._observe(i, sum(tested), len(tested))
        self._accepted = None
        self._extrapolate(num_offered)

    def update_one(self, num_offered: int, path: Sequence[int]) -> None:
        """The only draft of a round: as `update`."""
        chances, weights = self.chances, self._weights
        for i in range(num_offered):
            weights[i] = weight = ACCEPTANCE_MEMORY * weights[i] + 1
            chance = chances[i] + ((i + 1 in path) - chances[i]) / weight
            chances[i] = chance if chance > _LEAST_CHANCE else _LEAST_CHANCE
        self._accepted = None
        if num_offered < len(chances):
            self._extrapolate(num_offered)

    def _observe(self, i: int, num_accepted: int, count: int) -> None:
        """Observe a place in so many drafts of a round; the past is forgotten with each, but by at most an eighth."""
        self._weights[i] = weight = max(ACCEPTANCE_MEMORY**count, ROUND_MEMORY) * self._weights[i] + count
        chance = self.chances[i]
        self.chances[i] = max(chance + (num_accepted - count * chance) / weight, _LEAST_CHANCE)

    def _extrapolate(self, num_offered: int) -> None:
        chances, weights = self.chances, self._weights
        # A place that was not offered drifts towards the extrapolation from the places before it; else an estimate from
        # an earlier text would keep drafts short for ever.
        step = chances[num_offered - 1] ** (1 / num_offered)
        for i in range(num_offered, len(chances)):
            weights[i] *= _UNOFFERED_DECAY
            kept = min(weights[i] * (1 - ACCEPTANCE_MEMORY), 1.0) * _UNOFFERED_DECAY
            chances[i] = kept * chances[i] + (1 - kept) * chances[i - 1] * step

    def expected_accepted(self, num_tested: int) -> float:
        """Sum over the first `num_tested` nodes of P(the node is accepted | the one before it is)."""
        if self._accepted is None:
            before, self._accepted = 1.0, [0.0]
            for chance in self.chances:
                self._accepted.append(self._accepted[-1] + (chance / before if chance < before else 1.0))
                before = chance
        return self._accepted[num_tested]


_AVERAGE_STEPS = 16.0
"""Accepted draft tokens that the average expects of a request until its own acceptance weighs as much."""
_MOST_OVER_AVERAGE = 1.25


@dataclass(slots=True)
class RelativeAcceptance:
    """Accepted draft tokens of one request, or of one way to draft, and how many the average expected."""

    accepted: Ewma = field(default_factory=Ewma)
    expected: Ewma = field(default_factory=Ewma)

    def update(self, drafts: Sequence[tuple[int, int]], average: Survival) -> None:
        """The drafts of a round, (tokens, of which accepted); tested are the accepted ones and the first rejected."""
        self.accepted.update_round([accepted for _, accepted in drafts])
        self.expected.update_round([average.expected_accepted(min(taken + 1, ordered)) for ordered, taken in drafts])

    def update_one(self, num_tokens: int, num_accepted: int, average: Survival) -> None:
        """The only draft of a round."""
        expected = average.expected_accepted(num_accepted + (num_accepted < num_tokens))
        for one, value in ((self.accepted, num_accepted), (self.expected, expected)):  # as `Ewma.update`, uncalled
            one.weight = one.memory * one.weight + 1
            one.mean += (value - one.mean) / one.weight

    def ratio(self) -> float:
        """Acceptance per draft token, relative to the average."""
        accepted, expected = self.accepted, self.expected
        ratio = (accepted.mean * accepted.weight + _AVERAGE_STEPS) / (expected.mean * expected.weight + _AVERAGE_STEPS)
        return ratio if ratio < _MOST_OVER_AVERAGE else _MOST_OVER_AVERAGE

    @property
    def num_drafts(self) -> float:
        """Drafts that were observed, with forgetting."""
        return self.accepted.weight


AVERAGE = RelativeAcceptance()
"""Stands for a request or a way to draft without drafts: as the average. Never updated."""


class AcceptanceModel:
    """Chances of every place of a draft by class of text, and how requests and ways to draft differ from them."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._classes: dict[Hashable, Survival] = {}
        self._latest = Survival(longest)
        self.requests: dict[int, RelativeAcceptance] = {}
        self._ways: dict[Hashable, RelativeAcceptance] = {}

    def of_class(self, key: Hashable) -> Survival:
        """The average of a class; one that was never seen begins with the chances of the latest, without weight."""
        if key not in self._classes:
            self._classes[key] = Survival(self._longest, like=self._latest)
        return self._classes[key]

    def update(
        self, key: Hashable, way: Hashable, outcomes: Collection[DraftOutcome], left_out: Collection[int]
    ) -> None:
        """A round with drafts, made in this way, ended; requests that are `left_out` do not count for the average."""
        self._latest = average = self.of_class(key)
        of_way = self._ways.setdefault(way, RelativeAcceptance(Ewma(_LONG_MEMORY), Ewma(_LONG_MEMORY)))
        drafted = [outcome for outcome in outcomes if outcome.num_ordered]
        for outcome in drafted:
            request = self.requests.get(outcome.request_id)
            if request is None:
                request = self.requests[outcome.request_id] = RelativeAcceptance()
            request.update_one(outcome.num_ordered, len(outcome.path), average)
        counted = [outcome for outcome in drafted if outcome.request_id not in left_out]
        if len(counted) == 1:
            only = counted[0]
            of_way.update_one(only.num_ordered, len(only.path), average)
            average.update_one(only.num_ordered, only.path)
        elif counted:
            of_way.update([(outcome.num_ordered, len(outcome.path)) for outcome in counted], average)
            average.update([(outcome.num_ordered, outcome.path) for outcome in counted])

    def release(self, request_id: int) -> None:
        self.requests.pop(request_id, None)

    def of_request(self, request_id: int) -> RelativeAcceptance:
        return self.requests.get(request_id, AVERAGE)

    def num_drafts_of_mean(self, request_ids: Collection[int]) -> float:
        """Drafts of one request that tell as much of it as is known of the mean of these requests: what they differ
        in is independent, so the error of a mean shrinks with their number."""
        unknown = sum([1 / (1 + self.of_request(request_id).num_drafts) for request_id in request_ids])
        return len(request_ids) ** 2 / unknown - 1

    def expected(self, key: Hashable, request_ids: Collection[int], way: Hashable = None) -> list[float]:
        """Tokens of a pass for each request, in the mean, with drafts of 0, 1, 2, ... nodes; its own token included."""
        ratios = self._ratios(request_ids, way)
        chances = self.of_class(key).chances
        accepted = _accepted_at(chances, [(ratio, len(chances)) for ratio in ratios])
        tokens = [1.0]
        for total in accepted:
            tokens.append(tokens[-1] + total / len(ratios))
        return tokens

    def expected_of(self, key: Hashable, outcomes: Collection[DraftOutcome], way: Hashable = None) -> float:
        """Tokens that drafts of the ordered lengths bring a request in the mean, its own token included."""
        ratios = self._ratios([outcome.request_id for outcome in outcomes], way)
        lengths = [outcome.num_ordered for outcome in outcomes]
        return 1.0 + sum(_accepted_at(self.of_class(key).chances, zip(ratios, lengths, strict=True))) / len(lengths)

    def _ratios(self, request_ids: Collection[int], way: Hashable) -> list[float]:
        """Acceptance of these requests relative to the average, with drafts made in this way; of none, of the way."""
        of_way = self._ways.get(way, AVERAGE).ratio()
        return [of_way * self.of_request(request_id).ratio() for request_id in request_ids] or [of_way]


def _accepted_at(chances: Sequence[float], drafts: Iterable[tuple[float, int]]) -> list[float]:
    """Expected accepted tokens at each place, over drafts of a relative acceptance and a length."""
    accepted = [0.0] * len(chances)
    for ratio, length in drafts:  # of 64 requests in every round: no call for each place
        power = 1.0
        for place in range(length):
            power *= ratio
            chance = chances[place] * power
            accepted[place] += chance if chance < 1.0 else 1.0
    return accepted
