"""How many tokens to draft: the length with the most tokens per second, E(k) / T(k).

E follows from the measured acceptance of every place in a draft, T from measured rounds. In a batch each request gets
draft tokens as long as its next one is likelier to be accepted than what its time brings elsewhere. A request whose
drafts are never accepted gets none but for a rare attempt. Whether to speculate at all is the speculation switch's
decision. Works on counts and seconds; has no clock.

Sources: goodput of SmartSpec (arXiv 2406.14066), survival-ordered allocation of TETRIS (2502.15197).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from actors.policy.estimators import RequestAcceptance, RoundCosts, Survival

FIRST_LENGTH = 4
"""Draft tokens until costs are measured, if the bounds allow."""
EXPLORE_EVERY = 6
"""Every so many rounds drafts are a token shorter or longer than the best: costs show only where lengths vary."""
FIRST_RETRY, MAX_RETRY = 16, 512
"""Rounds after which a request without drafts is tried again; doubles each time nothing is accepted."""


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """Draft tokens that were ordered for a request in a round, and the nodes of its draft that were accepted.

    Tokens that were ordered and did not come, or not in time, count as not accepted: the order is what is chosen.
    `num_tokens` is what the pass brought the request if it verified a draft, else 0.
    """

    request_id: int
    num_ordered: int
    path: Sequence[int]
    num_tokens: int = 0


@dataclass(slots=True)
class _Retry:
    """When a request without drafts gets its next attempt."""

    wait: int = FIRST_RETRY
    rounds: int = 0


class DraftLengths:
    """Lengths within [`shortest`, `longest`], one for all requests or, in a batch, one for each."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._length = max(shortest, min(longest, FIRST_LENGTH))
        self._by_request: dict[int, int] = {}  # where lengths differ from `_length`
        self._survivals: dict[Hashable, Survival] = {}
        self._survival = Survival(longest)
        self._acceptance: dict[int, RequestAcceptance] = {}
        self._retries: dict[int, _Retry] = {}
        self._num_choices = 0

    def of(self, request_id: int) -> int:
        retry = self._retries.get(request_id)
        if retry is not None:
            return int(retry.rounds >= retry.wait)
        return self._by_request.get(request_id, self._length)

    def release(self, request_id: int) -> None:
        self._acceptance.pop(request_id, None)
        self._by_request.pop(request_id, None)
        self._retries.pop(request_id, None)

    def update(self, outcomes: Sequence[DraftOutcome], context: Hashable) -> None:
        """A round ended; acceptance is kept apart by `context`, a class of texts."""
        survival = self._survivals.get(context)
        if survival is None:
            survival = self._survivals[context] = Survival(self._longest, like=self._survival)
        self._survival = survival
        for outcome in outcomes:
            request_id, retry = outcome.request_id, self._retries.get(outcome.request_id)
            if not outcome.num_ordered:
                if retry is not None:
                    retry.rounds += 1
                continue
            if request_id not in self._acceptance:
                self._acceptance[request_id] = RequestAcceptance()
            self._acceptance[request_id].update(outcome.num_ordered, len(outcome.path), survival)
            if retry is None:
                survival.update(outcome.num_ordered, outcome.path)
            elif outcome.path:
                del self._retries[request_id]
                self._acceptance[request_id] = RequestAcceptance()
            else:
                retry.wait, retry.rounds = min(2 * retry.wait, MAX_RETRY), 0

    def choose(self, costs: RoundCosts, plain_verify_s: float, num_sequences: int) -> float:
        """Set the lengths of the next drafts, for a batch of `num_sequences`, once rounds with drafts were measured.

        Returns the tokens per second of one sequence that are expected of the best length, 0 before.
        """
        if not costs.gap.weight:
            return 0.0
        per_token_s = costs.per_token_s(plain_verify_s)
        tokens, seconds = self._survival.expected(), costs.seconds(self._longest, per_token_s)
        speeds = [tokens[k] / seconds[k] for k in range(self._longest + 1)]
        least = max(1, self._shortest)
        best = max(speeds[least:])
        length = speeds.index(best, least)
        self._num_choices += 1
        if self._num_choices % EXPLORE_EVERY == 0:
            is_shorter = length > least and self._num_choices % (2 * EXPLORE_EVERY)
            length = min(length + (-1 if is_shorter else 1), self._longest)
        self._length = length
        self._by_request = {}
        if num_sequences > 1:
            self._share_out(num_sequences, speeds[length], *per_token_s)
        return best

    def _share_out(self, num_sequences: int, speed: float, draft_s: float, verify_s: float) -> None:
        """Lengths of the requests of a batch: place by place, as long as a place brings more than its time elsewhere.

        `speed` is tokens per second of one sequence. A drafting pass costs `draft_s` however few requests take part.
        """
        lengths = dict.fromkeys(self._acceptance.keys() - self._retries.keys(), self._shortest)
        ratios = {request_id: self._acceptance[request_id].ratio() for request_id in lengths}
        average = self._survival.chances
        for place in range(self._shortest + 1, self._longest + 1):
            chances = (
                (request_id, average[place - 1] * ratios[request_id] ** place)
                for request_id, length in lengths.items()
                if length == place - 1
            )
            worth = {request_id: chance for request_id, chance in chances if chance >= speed * verify_s}
            if sum(worth.values()) < speed * (draft_s * num_sequences + verify_s * len(worth)):
                break
            lengths.update(dict.fromkeys(worth, place))
        if any(lengths.values()):  # else the speculation switch decides, on measured rounds
            self._retries.update({request_id: _Retry() for request_id, length in lengths.items() if not length})
            self._by_request = lengths
