"""Which of several drafters drafts for a request, and how many tokens: the most expected tokens per second.

An `Offer` is what a drafter could contribute: expected accepted tokens by draft length. Drafters that answer at once
(lookups) show their drafts first, and every one of them is scored against the committed text, used or not. A model is
scored only where it drafted, so it is explored by the rule of `decision`: tried where the error of its estimate, which
grows with the rounds that went by without it, could make it the fastest, within a budget. That error needs the count of
each drafter by itself: by the count of all it would be the same for every drafter and change no choice. Where a drafter
has yet to read much text before it can draft, its offer counts only if the drafts are expected to save that time until
the request ends, or if the budget can pay for it. Works on counts and seconds; has no clock and knows no token.

Sources: goodput of SmartSpec (arXiv 2406.14066); full feedback for drafts that are not used: HedgeSpec (2510.20064);
bandits over drafters: BanditSpec (2505.15141).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import exp, sqrt
from operator import itemgetter
from typing import NamedTuple

from actors.policy.acceptance import AVERAGE, RelativeAcceptance, Survival
from actors.policy.costs import IDLE_DECAY
from actors.policy.decision import (
    EXPLORED_SHARE,
    FULL_WEIGHT,
    MOST_BUDGET,
    REQUEST_ERROR,
    TIME_ERROR,
    TOKEN_ERROR,
)
from actors.policy.estimators import BySize, Ewma

NO_DRAFTER = -1
"""Stands for a request that gets no draft."""
_DRAFTER = itemgetter(0)
"""The drafter of a pick."""
PRIOR_DRAFTS = 2.0
"""Drafts that the estimate of a kind of draft begins with: what all drafts of its drafter are worth."""
PRIOR_TOKENS = 32.0
"""Tokens of a request after which its own savings weigh as much as the average of all requests."""
PRIOR_LENGTH = 128.0
"""Tokens that requests are expected to generate before one has ended."""
CREDIT = MOST_BUDGET
"""Rounds that trying drafters may lose at the start: as many as may be saved up, since a model has to read each prompt
before it is tried, and a few poor drafts at the start say little of it."""
_ITERATIONS = 3
LEAST_SCATTER = 2.0
"""Tokens of a round that the relative error of hidden drafts applies to at least: they come in runs, so that a few
drafts without a token are no certainty."""
_DRAFT_VARIANCE = TIME_ERROR**2 + TOKEN_ERROR**2
"""What one draft leaves unknown of the logarithm of its round's speed."""
_LEAST_DRAFTS = 0.1
"""Drafts that a drafter which never drafted counts as: its tokens may be all of them."""


class Offer(NamedTuple):
    """Draft lengths that one drafter could contribute for a request."""

    drafter: int
    lengths: Sequence[int]
    expected: Sequence[float]
    """Tokens expected to be accepted of a draft of each length."""
    read_s: float = 0.0
    """Seconds in which it has to read text first, beyond what a draft reads in any case."""
    error: float = 0.0
    """Standard error of the logarithm of the round's tokens, which more drafts would reduce; 0 where every draft is
    scored."""

    @property
    def optimistic(self) -> Offer:
        """The same if the error is in its favour, but no more than it drafts."""
        more, pairs = exp(self.error) - 1, zip(self.lengths, self.expected, strict=True)
        return self._replace(expected=[min(one + max(1 + one, LEAST_SCATTER) * more, k) for k, one in pairs])


class Assignment(NamedTuple):
    """The choice for each request (drafter, draft tokens), and the tokens and seconds that the round is expected to
    take."""

    picks: list[tuple[int, int]]
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of a round of `num_requests`: of each drafter that is used `draft_line(drafter, requests that use it)`,
    seconds without a draft token and of one more of its longest draft, and the rest of the round by its draft tokens,
    a line."""

    draft_line: Callable[[int, int], tuple[float, float]]
    rest_s: float
    per_row_s: float
    num_requests: int = 1

    def seconds(self, picks: Sequence[tuple[int, int]]) -> float:
        longest: dict[int, int] = {}
        users: dict[int, int] = {}
        num_rows = 0
        for drafter, length in picks:
            if length:
                num_rows += length
                users[drafter] = users.get(drafter, 0) + 1
                if length > longest.get(drafter, 0):
                    longest[drafter] = length
        seconds = self.rest_s + num_rows * self.per_row_s
        for drafter, length in longest.items():
            first_s, token_s = self.draft_line(drafter, users[drafter])
            seconds += max(0.0, first_s + length * token_s)
        return seconds

    def token_s(self, drafter: int) -> float:
        """What a draft token more costs a round in which all requests get one."""
        return self.num_requests * self.per_row_s + self.draft_line(drafter, self.num_requests)[1]


def assign(offers: Sequence[Sequence[Offer]], times: RoundTimes) -> Assignment:
    """The assignment of drafters to the requests of a batch with the most tokens per second.

    The seconds of a drafter are shared by the requests that use it, so every set of drafters is tried. Within a set a
    request takes the length that brings the most tokens beyond what its time brings elsewhere, which follows from the
    speed of the batch (Dinkelbach's iteration for a ratio).
    """
    if len(offers) == 1:  # every choice is tried
        pick, tokens, seconds = _alone(offers[0], times)
        return Assignment([pick], tokens, seconds)
    curves = [[_Curve.of(offer) for offer in request] for request in offers]
    token_s = {drafter: times.token_s(drafter) for drafter in {one.drafter for request in curves for one in request}}
    best = _within(curves, {}, times)
    for used in _subsets(sorted(token_s)):
        price, picks = 0.0, None
        for _ in range(_ITERATIONS):
            found = _within(curves, {drafter: price * token_s[drafter] for drafter in used}, times)
            if found.picks == picks:
                break
            if found.speed > best.speed:
                best = found
            price, picks = found.speed / len(offers), found.picks
    return best


class _Curve(NamedTuple):
    """The lengths of an offer that are the best at some price of a token, with what they bring: the upper hull, whose
    slopes fall from length to length. They are kept negated, in ascending order, to be searched."""

    drafter: int
    points: list[tuple[int, float]]
    descents: list[float]

    @classmethod
    def of(cls, offer: Offer) -> _Curve:
        points, descents = [(0, 0.0)], list[float]()
        for length, expected in zip(offer.lengths, offer.expected, strict=True):
            while True:
                last_length, last = points[-1]
                descent = (last - expected) / (length - last_length)
                if not descents or descent > descents[-1]:
                    break
                points.pop()
                descents.pop()
            points.append((length, expected))
            descents.append(descent)
        return cls(offer.drafter, points, descents)


def _within(curves: Sequence[Sequence[_Curve]], costs: Mapping[int, float], times: RoundTimes) -> Assignment:
    """Every request takes the best offer of these drafters, or none, where a draft token of each is worth so many
    tokens."""
    picks, tokens = [], float(len(curves))
    for request in curves:
        pick, value, most = (NO_DRAFTER, 0), 0.0, 0.0
        for drafter, points, descents in request:
            if drafter not in costs:
                continue
            cost = costs[drafter]
            length, expected = points[bisect_left(descents, -cost)]
            if expected - length * cost > most:
                pick, value, most = (drafter, length), expected, expected - length * cost
        picks.append(pick)
        tokens += value
    return Assignment(picks, tokens, times.seconds(picks))


def _subsets(drafters: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(drafters, size) for size in range(1, len(drafters) + 1))


# --- acceptance -------------------------------------------------------------------------------------------------------


class DrafterAcceptance:
    """Accepted tokens of one drafter's drafts, by kind of draft and by request; a draft is at most `longest` deep."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._all = Survival(longest)
        self._kinds: dict[Hashable, Survival] = {}
        self._requests: dict[int, RelativeAcceptance] = {}
        self.num_drafts = 0.0
        """Drafts that were scored, decayed by the rounds that went by without one."""

    def update(self, request_id: int, kind: Hashable, depth: int, num_accepted: int) -> None:
        """So many tokens of a draft that was `depth` deep agreed with the committed text."""
        one, own = self._kinds.get(kind), self._requests.get(request_id)
        if one is None:
            one = self._kinds[kind] = Survival(self._longest, like=self._all, weight=PRIOR_DRAFTS)
        if own is None:
            own = self._requests[request_id] = RelativeAcceptance()
        own.update_one(depth, num_accepted, one)
        path = range(1, num_accepted + 1)
        self._all.update_one(depth, path)
        one.update_one(depth, path)
        self.num_drafts += 1

    def release(self, request_id: int) -> None:
        self._requests.pop(request_id, None)

    def expected(self, request_id: int, kind: Hashable, depth: int) -> list[float]:
        """Tokens expected to be accepted of a draft of this kind that is 1, 2, ... `depth` deep."""
        chances = self._kinds.get(kind, self._all).chances[:depth]
        ratio = self._requests.get(request_id, AVERAGE).ratio()
        tokens, factor, expected = 0.0, 1.0, list[float]()
        for chance in chances:
            factor *= ratio
            own = chance * factor
            tokens += own if own < 1.0 else 1.0
            expected.append(tokens)
        return expected

    def error(self, request_id: int) -> float:
        """Standard error of the logarithm of the tokens of a round with its drafts."""
        own, known = self._requests.get(request_id, AVERAGE).accepted.weight, max(self.num_drafts, _LEAST_DRAFTS)
        of_drafts = _DRAFT_VARIANCE * max(0.0, 1 / known - 1 / FULL_WEIGHT)
        return sqrt(of_drafts + REQUEST_ERROR**2 * max(0.0, 1 / (1 + own) - 1 / FULL_WEIGHT))


# --- reading ----------------------------------------------------------------------------------------------------------


def saved_s(others: Sequence[Offer], offer: Offer, times: RoundTimes) -> tuple[float, float]:
    """Seconds that a round of requests with these offers saves if they have `offer` too, and its tokens."""
    (_, tokens, without_s), (_, more, found_s) = _alone(others, times), _alone([offer], times)
    saved = more * without_s / tokens - found_s
    return (saved, more) if saved > 0 else (0.0, tokens)


def _alone(offers: Sequence[Offer], times: RoundTimes) -> tuple[tuple[int, int], float, float]:
    """The best of all offers for one request, as the fields of an `Assignment`; also that of a batch of requests that
    are all like it."""
    pick, tokens, seconds = (NO_DRAFTER, 0), 1.0, times.rest_s
    rest_s, row_s = times.rest_s, times.num_requests * times.per_row_s
    for offer in offers:
        first_s, token_s = times.draft_line(offer.drafter, times.num_requests)
        for length, expected in zip(offer.lengths, offer.expected, strict=True):
            drafting_s = first_s + length * token_s
            took = rest_s + length * row_s + (drafting_s if drafting_s > 0.0 else 0.0)
            if (1 + expected) * seconds > tokens * took:
                pick, tokens, seconds = (offer.drafter, length), 1 + expected, took
    return pick, tokens, seconds


class ReadingValue:
    """What the drafts of one drafter save per generated token, had it read the text: of a request, and of all.

    Requests of another batch size save another time: a round that is shorter saves each of many requests little, and
    draft tokens for many take longer.
    """

    def __init__(self) -> None:
        self._all = BySize(Ewma, _saved_among)
        self._requests: dict[int, Ewma] = {}

    def update(self, request_id: int, num_requests: int, seconds: float, num_tokens: float) -> None:
        """A round of so many requests that brings so many tokens for this one would be so many seconds shorter."""
        of_all, own = self._all.measured(num_requests), self._requests.get(request_id)
        of_all.update(seconds / num_requests / num_tokens, num_tokens)
        if own is None:
            own = self._requests[request_id] = Ewma(mean=of_all.mean, weight=PRIOR_TOKENS)
        own.update(seconds / num_requests / num_tokens, num_tokens)

    def saves_s(self, request_id: int, num_requests: int, num_tokens: float) -> float:
        """Seconds that are saved until so many tokens were generated in rounds of so many requests."""
        own = self._requests.get(request_id)
        return num_tokens * (own if own is not None else self._all.known(num_requests)).mean

    def release(self, request_id: int) -> None:
        self._requests.pop(request_id, None)


def _saved_among(known: Ewma, num_known: float, num_requests: float) -> Ewma:
    """What a round saves each of other requests: its seconds are shared by more, or fewer."""
    return Ewma(mean=known.mean * num_known / num_requests, weight=min(known.weight, 1.0))


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
        self._hidden = frozenset(i for i, is_shown in enumerate(shown) if not is_shown)
        self._budget = CREDIT
        self._turn = 0

    def should_read(self, drafter: int, request_id: int, num_requests: int, num_generated: int, read_s: float) -> bool:
        """Whether a drafter saves one of so many requests more with its drafts, until it ends, than the seconds of
        reading its text."""
        to_come = self.lengths.to_come(num_generated)
        return self.reading[drafter].saves_s(request_id, num_requests, to_come) > read_s

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
        num_requests = len(offers)
        self._turn = (self._turn + 1) % num_requests
        weighed = []
        for row, (request_id, request) in enumerate(zip(request_ids, offers, strict=True)):
            ready, after = [offer for offer in request if not offer.read_s], list(request)
            if len(ready) < len(request) or row == self._turn:
                for i, offer in enumerate(request):
                    if self._shown[offer.drafter]:
                        continue
                    seconds, num_tokens = saved_s([one for one in ready if one is not offer], offer, times)
                    drafter, read_s = offer.drafter, offer.read_s
                    self.reading[drafter].update(request_id, num_requests, seconds, num_tokens)
                    if read_s and self.should_read(drafter, request_id, num_requests, num_generated[row], read_s):
                        after[i] = offer._replace(read_s=0.0)
            weighed.append(after)
        return weighed

    def choose(self, offers: Sequence[Sequence[Offer]], times: RoundTimes) -> Assignment:
        """The best assignment, or now and then one that would be the best if a drafter were underestimated.

        A drafter that has to read first can only be the second; the budget, in rounds, is saved up for it.
        """
        ready, most = offers, MOST_BUDGET
        if unread := [offer.read_s for request in offers for offer in request if offer.read_s]:
            ready = [[offer for offer in request if not offer.read_s] for request in offers]
        best = assign(ready, times)
        if unread:
            most += min(unread) / best.seconds
        self._budget = min(self._budget + EXPLORED_SHARE, most)
        tried = self._optimistic(offers, best, times)
        for one in self.acceptance:
            one.num_drafts *= IDLE_DECAY
        if tried is best:
            return best
        lost = (tried.seconds + _read_s(offers, tried.picks)) / best.seconds - tried.tokens / best.tokens
        if lost > self._budget:
            return best
        self._budget -= max(0.0, lost)
        return tried

    def _optimistic(self, offers: Sequence[Sequence[Offer]], best: Assignment, times: RoundTimes) -> Assignment:
        """The best assignment if drafters that it leaves out were underestimated by their errors."""
        hidden = self._hidden.difference(map(_DRAFTER, best.picks))
        if not hidden:
            return best
        most_s = self._budget * best.seconds
        affordable = [
            [one.optimistic if one.drafter in hidden else one for one in request if one.read_s <= most_s]
            for request in offers
        ]
        if not any(one.drafter in hidden for request in affordable for one in request):
            return best  # as where a model would have to read all the texts
        optimistic = assign(affordable, times)
        if hidden.isdisjoint(map(_DRAFTER, optimistic.picks)):
            return best
        return Assignment(optimistic.picks, expected_tokens(offers, optimistic.picks), optimistic.seconds)

    def release(self, request_id: int) -> None:
        for value in self.reading:
            value.release(request_id)
        for one in self.acceptance:
            one.release(request_id)


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
