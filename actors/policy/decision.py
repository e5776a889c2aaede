"""The decision: which choice has the most expected tokens per second, where plain decoding is one of the choices.

A choice is plain decoding, drafts in turn with the target, or drafts while the target works. Its speed is expected
tokens over expected seconds (`acceptance`, `costs`) at its best draft length.

Exploration follows one rule, optimism within a budget. A choice that looks slower is tried where the error of the
estimates could make it the fastest; that error shrinks with every round of the choice and grows with every round of
others. What such a trial loses against the choice that looks best is taken from a budget, counted in rounds of that
choice. It starts with `CREDIT`, gets `EXPLORED_SHARE` of every round, and no trial begins without it. So exploration
loses at most that credit, that share of the time, and what the last trial went beyond the budget. The optimism is
in `_upper_bound`, the budget in `_is_affordable`: another rule replaces the former, and the latter bounds any.

It counts rounds and compares speeds. It knows neither how drafts are made nor whose they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp, inf, log, sqrt

from actors.policy.estimators import MEMORY, OUTLIER


class Decoding(StrEnum):
    plain = "plain"
    in_turn = "in_turn"
    ahead = "ahead"

    @property
    def drafts(self) -> bool:
        return self is not Decoding.plain


class Mode(StrEnum):
    """What the next rounds are for."""

    speculate = "speculate"
    probe = "probe"  # plain rounds, to measure what speculation is compared with
    rest = "rest"  # plain rounds because they are faster
    catch_up = "catch_up"  # plain rounds in which the drafter reads the text of the requests of a trial
    trial = "trial"  # speculation with a few requests, to measure whether it pays


CREDIT = 1.0
"""Rounds that exploration may lose at the start: a few poor drafts at the start of a text say little of those to come.
With 0.4 two of them left 355 rounds of 384 tokens to plain decoding, where drafts were 1.65 times as fast."""
EXPLORED_SHARE = 0.015
"""Share of all rounds that exploration may lose."""
MOST_BUDGET = 4.0
"""Rounds that may be saved up for exploration."""
NEW_COST = 1.1
"""Rounds that must have been saved up before a way to draft that was never tried takes the place of another."""
MOST_CHARGED_BESIDE = 16.0
"""Rounds that what is done for drafts outside of rounds counts as at most: the machine may have paused."""
TIME_ERROR = 0.12
"""Relative error of the seconds of one round."""
TOKEN_ERROR = 0.6
"""Relative error of the tokens that one draft shows a choice to bring."""
REQUEST_ERROR = 0.4
"""Relative difference of requests in what drafts bring them."""
FULL_WEIGHT = 1 / (1 - MEMORY)
"""Weight of an estimate that more measurements do not make any better: as many are forgotten."""
STAYING_LOSS = 0.03
"""Share of the time that a choice which is not known well may lose for it to go on without a budget: leaving it and
trying it again would cost more."""
RETURN_GAIN = 0.02
"""Relative gain that another choice must have or promise, so that noise does not switch back and forth."""
SETTLE_ROUNDS = 1
"""Rounds after a change of the choice that are not measured: caches, prepared drafts and unread text."""
PROBE_ROUNDS = 2
"""Measured rounds of plain decoding before drafts are tried."""
PLAIN_ROUNDS = 1.5
"""Rounds of plain decoding that must be measured, less what was forgotten of them, before a trial."""
PROOF = 1.0
"""Standard errors of what drafts bring that a far drafter must be faster than plain decoding by, to be tried."""
PROOF_AFTER_LOSS = 2.0
"""The same once drafts that were proven so have lost more than exploration may."""
MOST_LOST = 8.0
"""Rounds that drafts of a far drafter may really have lost, since they began, whatever is expected of them."""
IMMINENT = 0.97
"""Share of its weight that plain decoding may lose until the next probe is due, for it to be expected at any round."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A choice as expected now, at its best draft length. What was measured is counted with forgetting."""

    tokens: float
    """Tokens of a request in a round."""
    seconds: float
    """Seconds of the round."""
    length: int = 0
    num_rounds: float = 0.0
    """Rounds of the choice that were measured."""
    num_drafts: float = 0.0
    """Drafts that were verified."""
    num_own_drafts: float = 0.0
    """Those of them that were for the present requests."""

    @property
    def log_speed(self) -> float:
        return log(self.tokens / self.seconds)

    @property
    def is_known(self) -> bool:
        return self.num_rounds > 0

    def error(self, *, of_tokens: bool, fade: float = 1.0) -> float:
        """Standard error of `log_speed`, of which more rounds can rid it, once its measurements have lost all but this
        share of their weight."""
        variance = TIME_ERROR**2 * max(0.0, 1 / (fade * self.num_rounds) - 1 / FULL_WEIGHT)
        return sqrt(variance + self.token_error**2) if of_tokens else sqrt(variance)

    @property
    def token_error(self) -> float:
        """That of the logarithm of `tokens` alone."""
        variance = TOKEN_ERROR**2 * max(0.0, 1 / max(self.num_drafts, 1e-6) - 1 / FULL_WEIGHT)
        return sqrt(variance + self._request_variance)

    @property
    def whole_token_error(self) -> float:
        """The same with what no more drafts rid it of, since as many are forgotten."""
        return sqrt(TOKEN_ERROR**2 / max(self.num_drafts, 1e-6) + self._request_variance)

    @property
    def _request_variance(self) -> float:
        return REQUEST_ERROR**2 * max(0.0, 1 / (1 + self.num_own_drafts) - 1 / FULL_WEIGHT)


Estimates = Mapping[Decoding, Estimate]


@dataclass(slots=True)
class Decision:
    """The choice for the next rounds, and what it follows from."""

    choice: Decoding
    budget: float = field(default_factory=lambda: CREDIT)  # read at each start, for measurements that vary it
    estimates: Estimates = field(default_factory=dict)
    best: Decoding = Decoding.plain
    """The choice with the most expected tokens per second by the estimates, without exploration."""
    awaited: Decoding | None = None
    """While the drafter catches up, what begins once it has and plain decoding is known."""
    mode: Mode = field(init=False)
    is_far: bool = False
    """An exchange with the drafter takes longer than a pass, and drafts beside plain decoding show what it brings: a
    trial has to be expected to pay by that."""
    is_too_far: bool = False
    """An exchange takes longer than a draft of which all is accepted is worth: it would not be waited for."""
    _rounds: int = SETTLE_ROUNDS  # of the present choice
    _is_caught_up: bool = False
    _has_drafted: bool = False
    _saves_up: bool = False  # for a choice that might be better, and cannot be afforded yet
    _unpaid: float = 0.0  # rounds' worth of what was done for drafts outside of rounds, not yet taken from the budget
    _budget_before: float = 0.0  # as drafts of a far drafter began
    _lost: float = 0.0  # plain rounds that these have really lost since
    _gained: float = 0.0  # rounds that drafts have saved since they last came too late

    def __post_init__(self) -> None:
        self.mode = Mode.speculate if self.choice.drafts else Mode.rest if self.awaited is None else Mode.catch_up

    @property
    def is_settled(self) -> bool:
        """Whether the present round shows what rounds of this choice cost."""
        return self._rounds >= SETTLE_ROUNDS

    @property
    def may_end(self) -> bool:
        """Whether the next round with drafts may be the last one for now."""
        return self.mode is Mode.trial or (self.choice.drafts and not self._wanted(IMMINENT).drafts)

    @property
    def gain(self) -> float | None:
        """Expected speed of the best way to draft over plain decoding; None until both are known."""
        plain = self.estimates.get(Decoding.plain)
        drafting = [one.log_speed for choice, one in self.estimates.items() if choice.drafts and one.is_known]
        if plain is None or not plain.is_known or not drafting:
            return None
        return exp(max(drafting) - plain.log_speed)

    def charge(self, rounds: float) -> None:
        """What was done for drafts outside of the rounds took as long as so many. It delays the next trial, and ends
        none.

        Drafts made behind the verdict that ended speculation are no exploration. The texts of the first trial are read
        once: charged, they kept drafts off for 100 to 250 rounds where these were 1.6 times as fast.
        """
        if self.is_settled or self.mode is not Mode.rest:
            self._unpaid += rounds

    def _pay(self) -> None:
        """A trial is paid once it is over, in full. What late drafts cost while drafts go on and pay takes the budget
        down to -`MOST_BUDGET` at most, and not before it exceeds what they have saved: pauses of a drafter are no
        exploration, and one of them would forbid the next trial for 340 rounds, many for minutes."""
        if self.mode in (Mode.catch_up, Mode.trial):
            return
        least = min(self.budget, -MOST_BUDGET) if self.mode is Mode.speculate else -inf
        paid = min(self._unpaid, self._gained) if self.mode is Mode.speculate else 0.0
        self._gained -= paid
        self.budget = max(self.budget - min(self._unpaid - paid, MOST_CHARGED_BESIDE), least)
        self._unpaid = 0.0

    def count(
        self,
        tokens: float,
        expected_s: float,
        seconds: float,
        estimates: Estimates | None = None,
        brought: float | None = None,
    ) -> None:
        """A round of the present choice took so long. Rounds like it are expected to take `expected_s`, and to bring a
        request so many tokens in the mean; what the first one takes beyond that is the price of the change.

        `estimates` are those under the load of this round, if it is another one than the last; where they are empty,
        since no request may be drafted for, it neither costs nor earns. `brought` are the tokens that it really brought
        a request, where they are not as many as expected.
        """
        self._rounds += 1
        plain = self.estimates.get(Decoding.plain)
        if self.is_far and self.choice.drafts and plain is not None and plain.is_known:
            self._lost += min(seconds, OUTLIER * expected_s) / plain.seconds - (tokens if brought is None else brought)
        best = (self.estimates if estimates is None else estimates).get(self.best)
        if best is None or not best.is_known:
            return
        took, is_first = expected_s / best.seconds, self._rounds <= SETTLE_ROUNDS
        if self.choice.drafts and not self._has_drafted:
            self._has_drafted, self._unpaid = True, 0.0
            return  # a process that runs this code for the first time; what it takes says nothing of later rounds
        if is_first:
            self.budget -= max(0.0, min(seconds, OUTLIER * expected_s) - expected_s) / best.seconds
        waits_for_proof = self.is_far and self.mode is Mode.rest
        if self.mode is Mode.trial or (self.choice is not self.best and not waits_for_proof):
            self.budget -= max(0.0, took - tokens / best.tokens)
        self.budget = min(self.budget + EXPLORED_SHARE * took, MOST_BUDGET)
        if self.mode is Mode.speculate and (gain := self.gain) is not None:
            self._gained += max(0.0, tokens / best.tokens * (1 - 1 / gain))

    def spend(self, rounds: float) -> bool:
        """Whether drafts may lose so many rounds to be explored; not while these are saved up for another choice."""
        is_best = self.choice is self.best and self.choice.drafts
        if not is_best or self._saves_up or self.budget < rounds:
            return False
        self.budget -= rounds
        return True

    def give_up(self) -> None:
        """The drafts of the present choice do not come in time: plain decoding, for a while."""
        self.budget -= max(0.0, NEW_COST - self._gained)
        self._gained = 0.0
        self.best = Decoding.plain
        self._change(Decoding.plain)

    def caught_up(self) -> bool:
        """The drafter has read the text of the requests to be drafted for; returns whether drafts begin."""
        self._is_caught_up = self.awaited is not None
        return self._begin_drafts()

    def decide(self, estimates: Estimates) -> None:
        """Choose for the next round."""
        self.estimates, self.best = estimates, self._best(estimates)
        if self.mode is Mode.trial and self.choice is self.best:
            self._unpaid = 0.0  # the text is read for drafts that go on
        self._pay()
        if self.is_far and self.choice.drafts and self._lost > MOST_LOST:
            self.best = Decoding.plain
            self._change(Decoding.plain)
            return
        if self._rounds < _least_rounds(self.choice):
            if self.mode is Mode.rest:
                self._await_drafts()
            return
        wanted = self._wanted()
        if self.mode is Mode.trial and self.choice is self.best:
            self.mode = Mode.speculate
        if self.choice.drafts or (self.mode is Mode.probe and wanted.drafts):
            self._change(wanted)
        else:
            if self.mode is Mode.probe:
                self._pay_in_full()
            self._await_drafts()

    def _await_drafts(self) -> None:
        """Decoding is plain: let the drafter read what a trial needs, if there is to be one."""
        wanted = self._wanted()
        begins = wanted.drafts and not self._is_risky(wanted)
        self.awaited, self.mode = (wanted, Mode.catch_up) if begins else (None, Mode.rest)
        self._begin_drafts()

    def _begin_drafts(self) -> bool:
        plain = self.estimates.get(Decoding.plain)
        knows_plain = plain is not None and plain.num_rounds >= PLAIN_ROUNDS
        if self.awaited is None or not self._is_caught_up or not knows_plain or self._is_risky(self.awaited):
            return False
        self._change(self.awaited)
        self.mode = Mode.trial
        return True

    def _change(self, choice: Decoding) -> None:
        if choice is not self.choice:
            is_probe = self.choice.drafts and self.best.drafts
            if choice.drafts and self.mode in (Mode.rest, Mode.catch_up):
                self._budget_before, self._lost = self.budget, 0.0
            elif self.choice.drafts and not choice.drafts and not is_probe:
                self._pay_in_full()
            self.mode = Mode.speculate if choice.drafts else Mode.probe if is_probe else Mode.rest
            self.choice, self._rounds = choice, 0
        self.awaited, self._is_caught_up = None, False

    def _pay_in_full(self) -> None:
        """Drafts of a far drafter end. They were proven to pay, so most of their rounds were no exploration; where they
        have lost time all the same, the proof was luck, and what they really lost is paid."""
        if self.is_far:
            self.budget = min(self.budget, self._budget_before - self._lost)
        self._lost = 0.0

    def _best(self, estimates: Estimates) -> Decoding:
        known = {choice: one.log_speed for choice, one in estimates.items() if one.is_known}
        if self.choice in known:
            known[self.choice] += RETURN_GAIN
        return max(known, key=lambda choice: known[choice], default=self.best)

    def _wanted(self, fade: float = 1.0) -> Decoding:
        """The best choice, or one that might be better and is affordable to try."""
        if self.best not in self.estimates:
            return self.best
        least = self.estimates[self.best].log_speed + RETURN_GAIN
        bounds = {choice: self._upper_bound(choice, fade) for choice in self._candidates}
        promising = {choice: bound for choice, bound in bounds.items() if bound > least}
        affordable = [choice for choice in promising if self._is_affordable(choice)]
        self._saves_up = len(affordable) < len(promising)
        return max(affordable, key=lambda choice: promising[choice], default=self.best)

    @property
    def _candidates(self) -> list[Decoding]:
        """While plain decoding is best only the best way to draft is tried: the ways differ little."""
        if self.best.drafts:
            return list(self.estimates)
        drafting = [choice for choice in self.estimates if choice.drafts]
        known = [choice for choice in drafting if self.estimates[choice].is_known] or drafting[:1]
        return [Decoding.plain, max(known, key=lambda choice: self.estimates[choice].log_speed)]

    def _is_affordable(self, choice: Decoding) -> bool:
        """Whether what a trial of the choice loses at least, by the estimates, has been saved up."""
        one, best = self.estimates[choice], self.estimates[self.best]
        if choice is self.best or (choice is self.choice and best.log_speed - one.log_speed < STAYING_LOSS):
            return True
        if self.is_far and self.mode in (Mode.rest, Mode.catch_up):
            return True  # where it is not risky
        if choice is self.choice or self.budget < 0:
            return self.budget >= 0
        if not one.is_known:
            return self.budget >= (NEW_COST if self.best.drafts else 0.0)
        lost = _least_rounds(choice) * (one.seconds / best.seconds - one.tokens / best.tokens)
        return self.budget >= min(lost, MOST_BUDGET)

    def _is_risky(self, choice: Decoding) -> bool:
        """Whether drafts of a far drafter are slower than plain decoding if the error of what they bring is against
        them. Plain rounds rid the estimate of it at no cost, so no budget is spent on that."""
        if not self.is_far:
            return False
        if self.is_too_far:
            return True
        one, plain = self.estimates.get(choice), self.estimates.get(Decoding.plain)
        if one is None or plain is None or not one.is_known or not plain.is_known:
            return True
        proof = PROOF if self.budget >= 0 else PROOF_AFTER_LOSS
        return one.log_speed - proof * one.whole_token_error < plain.log_speed

    def _upper_bound(self, choice: Decoding, fade: float) -> float:
        """Logarithm of the speed that the choice has if the error of its estimate is in its favour."""
        one, best = self.estimates[choice], self.best
        if choice is best:
            return one.log_speed
        if not one.is_known:
            return one.log_speed if best.drafts else inf
        return one.log_speed + one.error(of_tokens=choice.drafts and not best.drafts, fade=fade)


def _least_rounds(choice: Decoding) -> int:
    """Rounds that have to pass before the choice can change again."""
    return SETTLE_ROUNDS + (1 if choice.drafts else PROBE_ROUNDS)
