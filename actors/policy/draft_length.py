"""How many tokens to draft for each request, once it is decided that there are drafts.

All requests get the length with the most tokens per second, E(k) / T(k). In a batch each gets draft tokens as long as
its next one, by its chance to be accepted, saves the request more time than its row takes. A request whose drafts are
never accepted gets none but for a rare attempt. Works on counts and seconds; has no clock.

Sources: goodput of SmartSpec (arXiv 2406.14066), survival-ordered allocation of TETRIS (2502.15197).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from actors.policy.acceptance import AcceptanceModel, DraftOutcome

EXPLORE_EVERY = 6
"""Every so many rounds drafts are a token shorter or longer than the best, if what that loses may be spent: costs show
only where lengths vary."""
FIRST_LENGTH = 2
"""Draft tokens of the first drafts, whose cost is not known."""
TRIAL_COST = 0.15
"""Share by which a round of a trial may be longer than the best one, for its drafts to tell more."""
FIRST_RETRY, MAX_RETRY = 16, 512
"""Rounds after which a request without drafts is tried again; doubles each time nothing is accepted."""


@dataclass(slots=True)
class _Retry:
    """Rounds until a request without drafts gets its next attempt, and those that have passed."""

    wait: int = FIRST_RETRY
    rounds: int = 0


@dataclass(slots=True)
class Tradeoff:
    """What lengths bring and cost: `tokens` and `seconds` of a round with drafts of 0, 1, 2, ... tokens ordered
    for every request; one more costs `draft_s` outside of the target's pass and `verify_s` in it."""

    tokens: Sequence[float]
    seconds: Sequence[float]
    draft_s: float
    verify_s: float
    shortest: int = 0
    speeds: list[float] = field(init=False)
    """Tokens per second by length."""
    best: int = field(init=False)
    """The length with the most of them, at least one token and `shortest`."""

    def __post_init__(self) -> None:
        self.speeds = [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]
        self.best = max(range(max(1, self.shortest), len(self.speeds)), key=self.speeds.__getitem__)

    def informative(self) -> int:
        """The longest draft that takes at most `TRIAL_COST` more than the best: where most of a round is an exchange,
        one with a distant drafter, a short draft costs the same and tells less."""
        most_s = (1 + TRIAL_COST) * self.seconds[self.best]
        return max(length for length in range(self.best, len(self.tokens)) if self.seconds[length] <= most_s)


class DraftLengths:
    """Lengths within [`shortest`, `longest`], one for all requests or, in a batch, one for each."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._length = max(shortest, min(longest, FIRST_LENGTH))
        self._by_request: dict[int, int] = {}  # where lengths differ from `_length`
        self._retries: dict[int, _Retry] = {}
        self._num_choices = 0

    @property
    def retried(self) -> Collection[int]:
        """Requests that get no drafts but for a rare attempt."""
        return self._retries.keys()

    @property
    def longest_ordered(self) -> int:
        return max(self._by_request.values(), default=self._length)

    def of(self, request_id: int) -> int:
        retry = self._retries.get(request_id)
        if retry is not None:
            return int(retry.rounds >= retry.wait)
        return self._by_request.get(request_id, self._length)

    def release(self, request_id: int) -> None:
        self._by_request.pop(request_id, None)
        self._retries.pop(request_id, None)

    def update(self, outcomes: Sequence[DraftOutcome], acceptance: AcceptanceModel) -> None:
        """A round ended: attempts that had waited long enough are judged."""
        for outcome in outcomes if self._retries else ():
            retry = self._retries.get(outcome.request_id)
            if retry is None:
                continue
            if not outcome.num_ordered:
                retry.rounds += 1
            elif outcome.path:
                del self._retries[outcome.request_id]
                acceptance.release(outcome.request_id)
            else:
                retry.wait, retry.rounds = min(2 * retry.wait, MAX_RETRY), 0

    def choose_for_all(self, length: int) -> None:
        """The same length for every request, as where nothing is known of their rounds yet."""
        self._length, self._by_request = length, {}

    def choose(
        self,
        tradeoff: Tradeoff,
        request_ids: Collection[int],
        acceptance: AcceptanceModel,
        chances: Sequence[float],
        spend: Callable[[float], bool] = lambda _: True,
    ) -> None:
        """Set the lengths of the next drafts of these requests; `chances` are the average acceptance by place.

        `spend`: whether exploration may lose so many rounds, which are then counted.
        """
        self.choose_for_all(tradeoff.best)
        least, length = max(1, self._shortest), self._length
        self._num_choices += 1
        if self._num_choices % EXPLORE_EVERY == 0:
            is_shorter = length > least and self._num_choices % (2 * EXPLORE_EVERY)
            other = min(length + (-1 if is_shorter else 1), self._longest)
            if spend(1 - tradeoff.speeds[other] / tradeoff.speeds[length]):
                length = other
        self._length = length
        if len(request_ids) > 1:
            self._share_out(tradeoff, request_ids, acceptance, chances)

    def _share_out(
        self, tradeoff: Tradeoff, request_ids: Collection[int], acceptance: AcceptanceModel, average: Sequence[float]
    ) -> None:
        """Lengths of the requests of a batch: place by place, as long as a place saves more time than it takes.

        An accepted token saves a request the time of as many rounds as a token takes it, of each an equal share of what
        the round costs beside the rows of drafts. So a place deep in a draft is worth less to a request of many tokens
        a round than to others. Were it worth the same to all, drafts of easy texts would be too long: what is fastest
        now leaves the hard ones for later, where they fill the batch. Whether a request is drafted for at all is also
        judged by the speed of the batch, since its own is not known without drafts. A drafting pass costs `draft_s`
        however few requests take part.
        """
        lengths = {one: self._shortest for one in acceptance.requests if one not in self._retries}
        offered = []
        for request_id in lengths:
            ratio = acceptance.of_request(request_id).ratio()
            chances = [min(average[place - 1] * ratio**place, 1.0) for place in range(1, self._shortest + 1)]
            offered.append((request_id, ratio, 1.0 + sum(chances)))
        draft_s, verify_s = tradeoff.draft_s * len(request_ids), tradeoff.verify_s
        speed, shared_s = (
            tradeoff.speeds[self._length],
            max(0.0, tradeoff.seconds[self._length] - self._length * verify_s),
        )
        for place in range(self._shortest + 1, self._longest + 1):
            round_s, worth, saved_s = shared_s + (place - 1) * verify_s, [], 0.0
            for request_id, ratio, tokens in offered:
                chance = min(average[place - 1] * ratio**place, 1.0)
                token_s = round_s / tokens if place > 1 else min(round_s, 1 / speed)
                if (saves_s := chance * token_s) >= verify_s:
                    worth.append((request_id, ratio, tokens + chance))
                    saved_s += saves_s
            if not worth or saved_s < draft_s + verify_s * len(worth):
                break
            lengths.update([(request_id, place) for request_id, *_ in worth])
            offered = worth
        if any(lengths.values()):  # else the decision is for plain decoding, on measured rounds
            self._retries.update({request_id: _Retry() for request_id, length in lengths.items() if not length})
            self._by_request = lengths
