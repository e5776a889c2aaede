"""Which of several drafters drafts for a request, and how many tokens: the most expected tokens per second.

An `Offer` is what a drafter could contribute: expected accepted tokens by draft length. Drafters that answer at once
(lookups) show their drafts first, and every one of them is scored against the committed text, used or not. A model is
scored only where it drafted, so its acceptance is credited with its standard error, which grows with the rounds that
went by without it (UCB for changing rewards: Garivier and Moulines, arXiv 0805.3415). The bonus needs the count of each
drafter by itself: divided by the count of all, it is the same for every drafter and changes no choice. What exploration
may cost is a share of the time. Works on counts and seconds; has no clock and knows no token.

Sources: goodput of SmartSpec (arXiv 2406.14066); full feedback for drafts that are not used: HedgeSpec (2510.20064);
bandits over drafters: BanditSpec (2505.15141).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, combinations

from actors.policy.estimators import Ewma, RequestAcceptance, Survival

NO_DRAFTER = -1
"""Stands for a request that gets no draft."""
PRIOR_DRAFTS = 2.0
"""Drafts that the estimate of a kind of draft begins with: what all drafts of its drafter are worth."""
MEMORY = 0.99
"""Weight that a drafter's acceptance keeps in a round that does not use it."""
EXPLORE_SHARE = 0.03
"""Share of the time that rounds with a drafter that is not expected to be the best may lose."""
MOST_SAVED = 3.0
"""Rounds that may be lost at once."""
_ITERATIONS = 3
_LEAST_VARIANCE = 1.0
"""Of the accepted tokens of a draft: acceptance comes in runs, so a few equal outcomes are no certainty."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Draft lengths that one drafter could contribute for a request, and the tokens expected to be accepted of each."""

    drafter: int
    lengths: Sequence[int]
    expected: Sequence[float]


@dataclass(frozen=True, slots=True)
class Assignment:
    """For each request (drafter, draft tokens), and the tokens and seconds that the round is expected to take."""

    picks: list[tuple[int, int]]
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of a round: `draft_s(drafter, longest draft)` of each drafter that is used, and the rest of the round by
    the mean number of draft tokens of a request, a line."""

    draft_s: Callable[[int, int], float]
    rest_s: float
    per_row_s: float

    def seconds(self, picks: Sequence[tuple[int, int]]) -> float:
        longest: dict[int, int] = {}
        for drafter, length in picks:
            longest[drafter] = max(length, longest.get(drafter, 0))
        rows = sum(length for _, length in picks) / len(picks)
        return self.rest_s + rows * self.per_row_s + sum(self.draft_s(*used) for used in longest.items() if used[1])


def assign(offers: Sequence[Sequence[Offer]], times: RoundTimes) -> Assignment:
    """The assignment of drafters to the requests of a batch with the most tokens per second.

    The seconds of a drafter are shared by the requests that use it, so every set of drafters is tried. Within a set a
    request takes the length that brings the most tokens beyond what its time brings elsewhere, which follows from the
    speed of the batch (Dinkelbach's iteration for a ratio).
    """
    drafters = sorted({offer.drafter for request in offers for offer in request})
    best = _within([[] for _ in offers], 0.0, times)
    for used in _subsets(drafters):
        held = [[offer for offer in request if offer.drafter in used] for request in offers]
        price = 0.0
        for _ in range(_ITERATIONS):
            found = _within(held, price, times)
            price = found.speed / len(offers)
            if found.speed > best.speed:
                best = found
    return best


def _within(held: Sequence[Sequence[Offer]], price: float, times: RoundTimes) -> Assignment:
    """Every request takes its best offer, or none, where a second of one request is worth `price` tokens."""
    per_token = {
        drafter: price * (times.per_row_s + times.draft_s(drafter, 2) - times.draft_s(drafter, 1))
        for drafter in {offer.drafter for request in held for offer in request}
    }
    picks, tokens = [], float(len(held))
    for request in held:
        pick, value, most = (NO_DRAFTER, 0), 0.0, 0.0
        for offer in request:
            cost = per_token[offer.drafter]
            for length, expected in zip(offer.lengths, offer.expected, strict=True):
                if expected - length * cost > most:
                    pick, value, most = (offer.drafter, length), expected, expected - length * cost
        picks.append(pick)
        tokens += value
    return Assignment(picks, tokens, times.seconds(picks))


def _subsets(drafters: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(drafters, size) for size in range(1, len(drafters) + 1))


# --- acceptance -------------------------------------------------------------------------------------------------------


def standard_error(variance: float, num_own: float, num_all: float) -> float:
    """What the acceptance of a drafter is credited with after `num_own` of its drafts in `num_all` rounds."""
    return math.sqrt(variance * math.log(max(num_all, math.e)) / num_own)


@dataclass(slots=True)
class _Kind:
    """Drafts of one kind: how deep they were accepted, and the mean and mean square of their accepted tokens."""

    survival: Survival
    accepted: Ewma = field(default_factory=Ewma)
    squares: Ewma = field(default_factory=Ewma)

    def update(self, depth: int, num_accepted: int) -> None:
        self.survival.update(depth, range(1, num_accepted + 1))
        self.accepted.update(num_accepted)
        self.squares.update(num_accepted**2)

    @property
    def variance(self) -> float:
        return max(_LEAST_VARIANCE, self.squares.mean - self.accepted.mean**2)


class DrafterAcceptance:
    """Accepted tokens of one drafter's drafts, by kind of draft and by request; a draft is at most `longest` deep."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._all = _Kind(Survival(longest))
        self._kinds: dict[Hashable, _Kind] = {}
        self._requests: dict[int, RequestAcceptance] = {}
        self.num_drafts = 0.0
        """Drafts that were scored, decayed by the rounds that went by without one."""

    def update(self, request_id: int, kind: Hashable, depth: int, num_accepted: int) -> None:
        """Of a draft that was `depth` deep so many tokens agreed with the committed text."""
        one = self._kinds.get(kind)
        if one is None:
            one = self._kinds[kind] = _Kind(Survival(self._longest, like=self._all.survival, weight=PRIOR_DRAFTS))
        self._requests.setdefault(request_id, RequestAcceptance()).update(depth, num_accepted, one.survival)
        for scored in (self._all, one):
            scored.update(depth, num_accepted)
        self.num_drafts += 1

    def round_passed(self) -> None:
        self.num_drafts *= MEMORY

    def release(self, request_id: int) -> None:
        self._requests.pop(request_id, None)

    def expected(self, request_id: int, kind: Hashable, depth: int) -> list[float]:
        """Tokens expected to be accepted of a draft of this kind that is 1, 2, ... `depth` deep."""
        chances = self._kinds.get(kind, self._all).survival.chances[:depth]
        request = self._requests.get(request_id)
        ratio = 1.0 if request is None else request.ratio()
        return list(accumulate(min(1.0, chance * ratio ** (i + 1)) for i, chance in enumerate(chances)))

    def credit(self, num_rounds: float) -> float:
        """Tokens that the acceptance of this drafter may be underestimated by after so many rounds."""
        return standard_error(self._all.variance, max(self.num_drafts, 0.1), num_rounds)


# --- the choice -------------------------------------------------------------------------------------------------------


class DrafterChoice:
    """Chooses among drafters whose drafts are at most `longest[i]` deep; `shown[i]`: it shows every draft first."""

    def __init__(self, longest: Sequence[int], shown: Sequence[bool]) -> None:
        self.acceptance = [DrafterAcceptance(one) for one in longest]
        self._shown = shown
        self._num_rounds = 0.0
        self._saved_s = 0.0

    def choose(self, offers: Sequence[Sequence[Offer]], times: RoundTimes) -> Assignment:
        """The best assignment, or now and then one that would be the best if a drafter were underestimated."""
        best = assign(offers, times)
        self._saved_s = min(self._saved_s + EXPLORE_SHARE * best.seconds, MOST_SAVED * best.seconds)
        used = {drafter for drafter, _ in best.picks}
        hidden = [i for i, is_shown in enumerate(self._shown) if not is_shown and i not in used]
        self._num_rounds = MEMORY * self._num_rounds + 1
        credits = {i: self.acceptance[i].credit(self._num_rounds) for i in hidden}
        for one in self.acceptance:
            one.round_passed()
        credited = [[_with_credit(offer, credits.get(offer.drafter, 0.0)) for offer in request] for request in offers]
        hoped = assign(credited, times) if credits else best
        if not {drafter for drafter, _ in hoped.picks} & credits.keys():
            return best
        tried = Assignment(hoped.picks, expected_tokens(offers, hoped.picks), hoped.seconds)
        loss_s = tried.seconds - tried.tokens / best.speed
        if loss_s > self._saved_s:
            return best
        self._saved_s -= max(0.0, loss_s)
        return tried

    def release(self, request_id: int) -> None:
        for one in self.acceptance:
            one.release(request_id)


def _with_credit(offer: Offer, credit: float) -> Offer:
    """The offer with so many tokens more, but no more than it drafts."""
    if not credit:
        return offer
    expected = [min(value + credit, length) for value, length in zip(offer.expected, offer.lengths, strict=True)]
    return Offer(offer.drafter, offer.lengths, expected)


def expected_tokens(offers: Sequence[Sequence[Offer]], picks: Sequence[tuple[int, int]]) -> float:
    """Tokens of a round with these picks, the target's own included."""
    tokens = float(len(picks))
    for request, (drafter, length) in zip(offers, picks, strict=True):
        offer = next((one for one in request if one.drafter == drafter), None)
        tokens += offer.expected[offer.lengths.index(length)] if offer is not None else 0.0
    return tokens
