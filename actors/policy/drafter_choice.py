"""Which of several drafters drafts for a request, and how many tokens: the most expected tokens per second.

An `Offer` is what a drafter could contribute: expected accepted tokens by draft length. Drafters that answer at once
(lookups) show their drafts first, and every one of them is scored against the committed text, used or not. A model is
scored only where it drafted, so its acceptance is credited with its standard error, which grows with the rounds that
went by without it (UCB for changing rewards: Garivier and Moulines, arXiv 0805.3415). The bonus needs the count of each
drafter by itself: divided by the count of all, it is the same for every drafter and changes no choice. What exploration
may cost is a share of the time. Where a drafter has yet to read much text before it can draft, its offer counts only if
the drafts are expected to save that time until the request ends, or if exploration can pay for it. Works on counts and
seconds; has no clock and knows no token.

Sources: goodput of SmartSpec (arXiv 2406.14066); full feedback for drafts that are not used: HedgeSpec (2510.20064);
bandits over drafters: BanditSpec (2505.15141).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, combinations

from actors.policy.acceptance import RelativeAcceptance, Survival
from actors.policy.estimators import Ewma

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
PRIOR_TOKENS = 32.0
"""Tokens of a request after which its own savings weigh as much as the average of all requests."""
PRIOR_LENGTH = 128.0
"""Tokens that requests are expected to generate before one has ended."""
_ITERATIONS = 3
_LEAST_VARIANCE = 1.0
"""The least variance of a draft's accepted tokens: they come in runs, so a few equal outcomes are no certainty."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Draft lengths that one drafter could contribute for a request, and the tokens expected to be accepted of each.

    `read_s`: seconds in which it has to read text first, beyond what a draft reads in any case.
    """

    drafter: int
    lengths: Sequence[int]
    expected: Sequence[float]
    read_s: float = 0.0


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
        self._requests: dict[int, RelativeAcceptance] = {}
        self.num_drafts = 0.0
        """Drafts that were scored, decayed by the rounds that went by without one."""

    def update(self, request_id: int, kind: Hashable, depth: int, num_accepted: int) -> None:
        """So many tokens of a draft that was `depth` deep agreed with the committed text."""
        one = self._kinds.get(kind)
        if one is None:
            one = self._kinds[kind] = _Kind(Survival(self._longest, like=self._all.survival, weight=PRIOR_DRAFTS))
        self._requests.setdefault(request_id, RelativeAcceptance()).update(depth, num_accepted, one.survival)
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


# --- reading ----------------------------------------------------------------------------------------------------------


def saved_s(others: Sequence[Offer], offer: Offer, times: RoundTimes) -> tuple[float, float]:
    """Seconds that a round of requests with these offers saves if they have `offer` too, and its tokens."""
    without = _alone(others, times)
    found = max(without, _alone([offer], times), key=lambda option: option.speed)
    return found.tokens / without.speed - found.seconds, found.tokens


def _alone(offers: Sequence[Offer], times: RoundTimes) -> Assignment:
    """The best of all offers for one request; also that of a batch of requests that are all like it."""
    picks = [(NO_DRAFTER, 0, 0.0)]
    picks += [(one.drafter, *pair) for one in offers for pair in zip(one.lengths, one.expected, strict=True)]
    options = [Assignment([(i, k)], 1 + expected, times.seconds([(i, k)])) for i, k, expected in picks]
    return max(options, key=lambda option: option.speed)


class ReadingValue:
    """What the drafts of one drafter save per generated token, had it read the text: of a request, and of all."""

    def __init__(self) -> None:
        self._all = Ewma()
        self._requests: dict[int, Ewma] = {}

    def update(self, request_id: int, seconds: float, num_tokens: float) -> None:
        """A round that brings so many tokens for this request would be so many seconds shorter."""
        self._all.update(seconds / num_tokens, num_tokens)
        own = self._requests.setdefault(request_id, Ewma(mean=self._all.mean, weight=PRIOR_TOKENS))
        own.update(seconds / num_tokens, num_tokens)

    def saves_s(self, request_id: int, num_tokens: float) -> float:
        """Seconds that are saved until so many tokens were generated."""
        return num_tokens * self._requests.get(request_id, self._all).mean

    def release(self, request_id: int) -> None:
        self._requests.pop(request_id, None)


class RequestLengths:
    """Tokens that requests generate."""

    def __init__(self) -> None:
        self._mean = Ewma(mean=PRIOR_LENGTH, weight=1.0)

    def ended(self, num_tokens: int) -> None:
        if num_tokens:
            self._mean.update(num_tokens)

    def to_come(self, num_tokens: int) -> float:
        """Tokens to come after so many: as many as other requests had, and of a longer one as many as it has more."""
        return abs(self._mean.mean - num_tokens)


# --- the choice -------------------------------------------------------------------------------------------------------


class DrafterChoice:
    """Chooses among drafters whose drafts are at most `longest[i]` deep; `shown[i]`: it shows every draft first."""

    def __init__(self, longest: Sequence[int], shown: Sequence[bool]) -> None:
        self.acceptance = [DrafterAcceptance(one) for one in longest]
        self.reading = [ReadingValue() for _ in longest]
        self.lengths = RequestLengths()
        self._shown = shown
        self._num_rounds = 0.0
        self._saved_s = 0.0
        self._turn = 0

    def should_read(self, drafter: int, request_id: int, num_generated: int, read_s: float) -> bool:
        """Whether a drafter saves more with its drafts until the request ends than the seconds of reading its text."""
        to_come = self.lengths.to_come(num_generated)
        return self.reading[drafter].saves_s(request_id, to_come) > read_s

    def weigh_reading(
        self,
        request_ids: Sequence[int],
        num_generated: Sequence[int],
        offers: Sequence[Sequence[Offer]],
        times: RoundTimes,
    ) -> list[list[Offer]]:
        """The offers without `read_s` where reading pays.

        What a drafter saves is learned at requests that it has to read, and at one other of the batch. Drafters that
        have to read are compared with those that need not; a round that is shorter saves each request its part.
        """
        self._turn = (self._turn + 1) % len(offers)
        weighed = []
        for row, (request_id, request) in enumerate(zip(request_ids, offers, strict=True)):
            ready = [offer for offer in request if not offer.read_s]
            for offer in request:
                if not self._shown[offer.drafter] and (offer.read_s or row == self._turn):
                    others = [one for one in ready if one is not offer]
                    seconds, num_tokens = saved_s(others, offer, times)
                    self.reading[offer.drafter].update(request_id, seconds / len(offers), num_tokens)
            weighed.append(
                [
                    replace(offer, read_s=0.0)
                    if offer.read_s and self.should_read(offer.drafter, request_id, num_generated[row], offer.read_s)
                    else offer
                    for offer in request
                ]
            )
        return weighed

    def choose(self, offers: Sequence[Sequence[Offer]], times: RoundTimes) -> Assignment:
        """The best assignment, or now and then one that would be the best if a drafter were underestimated.

        A drafter that has to read first can only be the second; time is saved up for it.
        """
        best = assign([[offer for offer in request if not offer.read_s] for request in offers], times)
        unread = [offer.read_s for request in offers for offer in request if offer.read_s]
        most_s = MOST_SAVED * best.seconds + min(unread, default=0.0)
        self._saved_s = min(self._saved_s + EXPLORE_SHARE * best.seconds, most_s)
        used = {drafter for drafter, _ in best.picks}
        hidden = [i for i, is_shown in enumerate(self._shown) if not is_shown and i not in used]
        self._num_rounds = MEMORY * self._num_rounds + 1
        credits = {i: self.acceptance[i].credit(self._num_rounds) for i in hidden}
        for one in self.acceptance:
            one.round_passed()
        affordable = [[offer for offer in request if offer.read_s <= self._saved_s] for request in offers]
        credited = [
            [_with_credit(offer, credits.get(offer.drafter, 0.0)) for offer in request] for request in affordable
        ]
        hoped = assign(credited, times) if credits else best
        if not {drafter for drafter, _ in hoped.picks} & credits.keys():
            return best
        tried = Assignment(hoped.picks, expected_tokens(offers, hoped.picks), hoped.seconds)
        loss_s = tried.seconds + _read_s(offers, hoped.picks) - tried.tokens / best.speed
        if loss_s > self._saved_s:
            return best
        self._saved_s -= max(0.0, loss_s)
        return tried

    def release(self, request_id: int) -> None:
        for value in self.reading:
            value.release(request_id)
        for one in self.acceptance:
            one.release(request_id)


def _with_credit(offer: Offer, credit: float) -> Offer:
    """The offer with so many tokens more, but no more than it drafts."""
    if not credit:
        return offer
    expected = [min(value + credit, length) for value, length in zip(offer.expected, offer.lengths, strict=True)]
    return replace(offer, expected=expected)


def expected_tokens(offers: Sequence[Sequence[Offer]], picks: Sequence[tuple[int, int]]) -> float:
    """Tokens of a round with these picks, the target's own included."""
    tokens = float(len(picks))
    for request, (drafter, length) in zip(offers, picks, strict=True):
        offer = next((one for one in request if one.drafter == drafter), None)
        tokens += offer.expected[offer.lengths.index(length)] if offer is not None else 0.0
    return tokens


def _read_s(offers: Sequence[Sequence[Offer]], picks: Sequence[tuple[int, int]]) -> float:
    """Seconds in which the drafters of these picks read."""
    return sum(
        offer.read_s
        for request, (drafter, _) in zip(offers, picks, strict=True)
        for offer in request
        if offer.drafter == drafter
    )
