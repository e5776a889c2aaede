"""The speculation switch: speculation goes on only while it measures faster than plain decoding.

Counts rounds and compares two measured rates; it does not know what a draft is. It begins with plain rounds, while the
drafter reads the texts of a few requests of the batch, and tries speculation with those. While speculating, it measures
a few plain rounds now and then (a probe); at rest it repeats the trial now and then. Both become rarer the clearer and
the longer the result has been the same. What speculation lost against plain decoding is kept as a balance, in plain
rounds, and what was done for it outside of its rounds, such as reading text, as a debt: where both are more than what
may be lost, decoding is plain until a small share of the time has paid for another trial.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from actors.policy.estimators import Rate


class Mode(StrEnum):
    """What the next rounds are for."""

    speculate = "speculate"
    probe = "probe"  # plain rounds, to measure what speculation is compared with
    rest = "rest"  # plain rounds because they are faster
    catch_up = "catch_up"  # plain rounds in which the drafter reads the text of the requests of a trial
    trial = "trial"  # speculation with a few requests, to measure whether it pays


PROBE_ROUNDS = 2
TRIAL_ROUNDS = 6
MIN_TRIAL = 2
"""Rounds of a trial, at least and at most."""
TRIAL_SHARE = 8
"""One of so many requests takes part in a trial, at least two."""
TRIAL_LENGTH = 2
"""Draft tokens of a request in a trial, at most: what longer drafts would bring follows from cost and acceptance."""
FIRST_PROBE = 6
"""Rounds of speculation before the first probe, where a load began with the conclusion of another."""
MIN_INTERVAL, MAX_INTERVAL = 32, 512
"""Rounds of speculation between two probes."""
FIRST_REST, MIN_REST, MAX_REST = 16, 32, 128
"""Plain rounds between two trials: after the first, and after later ones."""
MARGIN = 0.6
"""Speculation ends if its gain is below 1 - `MARGIN` / sqrt(tokens it was measured on)."""
STALE_ROUNDS = 8
"""Rounds after which plain decoding is measured anew before speculation ends: the machine may have become slower."""
CLEAR_GAIN = 1.15
"""From this gain on probes become rarer."""
RETURN_GAIN = 1.02
"""Gain of a trial that ends it with success: a margin, so that noise does not switch back and forth."""
REST_PER_CATCH_UP = 10
"""Rounds of rest, at least, for each round in which the drafter read the text it missed."""
LATE_ROUNDS = 8
"""Rounds in a row that did not wait for their drafts, after which speculation ends: nothing is speculated any more."""
HOPELESS_GAIN = 0.9
"""A trial with a gain below this, expected of longer drafts too, ends early."""
CLEAR_LOSS = 0.7
"""Below this gain, if it is not the first trial, the next one is further off."""
CREDIT = 1.0
"""Plain rounds that speculation may lose before it is known whether it pays."""
MAX_CREDIT = 4.0
"""Plain rounds that it may lose after it has gained as many."""
TRIAL_TAX = 0.015
"""Share of the time of plain rounds that trials may lose."""
_SLOW, _SLOW_DRAFT = 4.0, 16.0
"""Most that one round is charged with for its pass, and for its drafts, in plain rounds: a pause of the machine is not
the fault of speculation, nor are kernels that are compiled once its cost."""


Rates = dict[int, Rate]
"""By the prompt rows that a round read besides, in steps of twice as many: the bit length of their number."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Speculation against plain decoding over rounds that read as many prompt rows; decayed tokens and rounds."""

    gain: float | None
    tokens: float
    num_rounds: float


@dataclass(slots=True)
class SpeculationSwitch:
    """Mode of one kind of load, and the rates it follows from. `balance`: plain rounds that may still be lost; `debt`:
    plain rounds that reading text and drafts that were not verified took, to be paid back before the next trial."""

    mode: Mode = Mode.catch_up
    speculative: Rates = field(default_factory=dict)
    plain: Rates = field(default_factory=dict)
    interval: int = MIN_INTERVAL
    rest: int = FIRST_REST
    balance: float = CREDIT
    debt: float = 0.0
    _unused_s: float = 0.0  # not in the debt yet: no plain round was measured
    _rounds: int = 0  # since the mode began
    _catch_up_rounds: int = 0
    _late_rounds: int = 0  # in a row
    _has_read: bool = False  # the drafter has caught up; the trial awaits a measured plain round
    _after_prompt: bool = False
    _prospect: float = 0.0
    _is_partial: bool = False  # only some requests take part in the trial
    _is_concluded: bool = False  # the first trial ended
    _is_plain_expected: bool = False  # `plain` is an expectation from other loads, not measured

    @property
    def speculates(self) -> bool:
        """Whether the next rounds speculate."""
        return self.mode is Mode.speculate or self.mode is Mode.trial

    @property
    def may_end(self) -> bool:
        """Whether the next round with drafts may be the last one, so that drafts made before its verdict is judged may
        be for nothing."""
        return self.mode is Mode.trial or (self.mode is Mode.speculate and self._rounds + 1 >= self.interval)

    @property
    def trial_length(self) -> int:
        """Draft tokens of a request in the next round of a trial: costs show where lengths vary."""
        return min(self._rounds + 1, TRIAL_LENGTH)

    def num_followed(self, num_requests: int) -> int:
        """Requests whose texts the drafter should have read: all, those of a trial, or none."""
        match self.mode:
            case Mode.rest:
                return 0
            case Mode.catch_up | Mode.trial:
                return min(num_requests, max(2, num_requests // TRIAL_SHARE))
        return num_requests

    def for_similar_load(self, plain: Rate | None = None) -> SpeculationSwitch:
        """A switch that starts with the conclusion of this one, if it has come to one.

        `plain` is what plain rounds are expected to bring there. Speculation that is slower is probed at once.
        """
        if not self._is_concluded:
            return SpeculationSwitch(balance=self.balance, debt=self.debt)
        mode = Mode.speculate if self.mode in (Mode.speculate, Mode.probe) else Mode.rest
        rest = min(self.rest, 2 * MIN_REST)
        switch = SpeculationSwitch(mode, interval=FIRST_PROBE, rest=rest, balance=self.balance, debt=self.debt)
        switch._is_concluded = True
        if plain is not None:
            switch.plain, switch._is_plain_expected = {0: plain}, True
        return switch

    @property
    def _knows_plain(self) -> bool:
        return sum(rate.num_rounds for rate in self.plain.values()) > PROBE_ROUNDS - 0.5  # they are decayed

    @property
    def gain(self) -> float | None:
        """Measured speed of speculation over plain decoding, comparing rounds that read as many prompt rows."""
        return self._compare().gain

    def findings(self) -> dict[str, str | float | None]:
        """The mode and the measurements behind it; tokens per second are of rounds that read no prompts."""
        plain = self.plain.get(0)
        return {
            "mode": self.mode.value,
            "plain_tokens_per_s": plain.per_s if plain is not None else None,
            "gain": self.gain,
        }

    def _compare(self) -> _Comparison:
        plain_s = seconds = tokens = num_rounds = 0.0
        for kind, rate in self.speculative.items():
            plain = self.plain.get(kind)
            if plain is not None:
                plain_s += rate.tokens.total / plain.per_s  # that plain rounds would need for these tokens
                seconds += rate.seconds.total
                tokens += rate.tokens.total
                num_rounds += rate.num_rounds
        return _Comparison(plain_s / seconds if seconds else None, tokens, num_rounds)

    def update(
        self,
        num_tokens: int,
        seconds: float,
        *,
        speculated: bool,
        willing: bool,
        skipped_drafts: bool = False,
        num_prompt_rows: int = 0,
        whole_tokens: float | None = None,
        prospect: float = 0.0,
        draft_s: float = 0.0,
        unused_s: float = 0.0,
        serves_drafts: bool = False,
    ) -> None:
        """A round ended. `willing`: some request of it allows speculation.

        `skipped_drafts`: drafts had been ordered, but the round did not wait for them. `whole_tokens`: what the round
        would have brought if each request had had a draft. `prospect`: tokens per second of one request that are
        expected of the best draft length. `draft_s` of the `seconds` went to drafts; `unused_s` came on top and went to
        no draft of the round. `serves_drafts`: the pass did more than a plain one, for drafts of the next round.
        """
        kind = num_prompt_rows.bit_length()
        leads_in = serves_drafts and not speculated and not kind
        is_first, self._after_prompt = self._after_prompt and not kind, kind > 0
        self._settle(num_tokens, seconds, draft_s, unused_s, kind, is_plain=not speculated and not leads_in)
        # The first pass after prompts finds other data in the caches, and may be the first of its size.
        rates = self.speculative if speculated else self.plain
        is_disturbed = leads_in or (willing and self.mode is Mode.catch_up and self._knows_plain)
        if not is_first and not is_disturbed:
            if not speculated and self._is_plain_expected:
                self.plain, self._is_plain_expected = {}, False
                rates = self.plain
            tokens = num_tokens if whole_tokens is None else whole_tokens
            rates.setdefault(kind, Rate()).update(tokens, seconds)
        if not willing:
            return
        self._is_partial |= whole_tokens is not None and whole_tokens != num_tokens
        self._prospect = prospect * self.plain[kind].seconds.mean if kind in self.plain else 0.0
        self._late_rounds = self._late_rounds + 1 if skipped_drafts else 0
        self._rounds += speculated == self.speculates
        match self.mode:
            case Mode.speculate if self._late_rounds >= LATE_ROUNDS:
                self._enter(Mode.rest)
            case Mode.speculate:
                self._judge_speculation()
            case Mode.probe if self._rounds >= PROBE_ROUNDS:
                self._enter(Mode.speculate)
                self._judge_speculation()
            case Mode.catch_up:
                self._catch_up_rounds = self._rounds * self._is_concluded  # at first they measure plain decoding
                self._begin_trial()
            case Mode.rest if self._rounds >= self.rest and self.balance > self.debt:
                self._enter(Mode.catch_up)
            case Mode.trial:
                self._judge_trial()

    def caught_up(self) -> bool:
        """The drafter has read the texts of the trial; returns whether it begins."""
        self._has_read = self.mode is Mode.catch_up
        return self._begin_trial()

    def _begin_trial(self) -> bool:
        if not self._has_read or not self._knows_plain:
            return False
        self._enter(Mode.trial)
        self.speculative = {}
        return True

    def _enter(self, mode: Mode) -> None:
        self._is_concluded |= mode in (Mode.speculate, Mode.rest)
        self.mode, self._rounds, self._late_rounds, self._has_read = mode, 0, 0, False
        self._is_partial = False

    def _settle(
        self, num_tokens: int, seconds: float, draft_s: float, unused_s: float, kind: int, *, is_plain: bool
    ) -> None:
        """Balance what the round took against what plain decoding would have taken for its tokens."""
        plain = self.plain.get(kind)
        self._unused_s += unused_s
        if plain is None:
            return
        round_s = plain.seconds.mean
        self.debt += min(self._unused_s / round_s, _SLOW_DRAFT)
        self._unused_s = 0.0
        if is_plain and self.mode is not Mode.catch_up:
            self._earn(TRIAL_TAX, CREDIT)
            return
        charged_s = min(seconds - draft_s, _SLOW * round_s) + min(draft_s, _SLOW_DRAFT * round_s)
        gained = (num_tokens / plain.per_s - charged_s) / round_s
        if gained < 0:
            self.balance += gained
        else:
            self._earn(gained, MAX_CREDIT)

    def _earn(self, rounds: float, most: float) -> None:
        """Fill the balance up to the first credit, then pay the debt back, then raise the balance up to `most`."""
        left = rounds - max(0.0, min(rounds, CREDIT - self.balance))
        paid = min(left, self.debt)
        self.debt -= paid
        self.balance = max(self.balance, min(self.balance + rounds - paid, most))

    def _judge_speculation(self) -> None:
        found = self._compare()
        overdrawn = self.balance < 0
        if self.balance < -MAX_CREDIT and self._rounds > STALE_ROUNDS:
            # whatever the mean of many rounds says: machine or text have changed, both sides are measured anew
            self.balance, self.speculative = 0.0, {}
            self._measure_anew()
            return
        is_known = found.num_rounds > (0 if overdrawn else MIN_TRIAL - 1)
        gain = found.gain if is_known else None
        if gain is not None and gain < (1.0 if overdrawn else 1 - MARGIN / found.tokens**0.5):
            is_stale = self._rounds > STALE_ROUNDS or self._is_plain_expected
            if self._rounds < MIN_INTERVAL and not is_stale:  # the trial misled, or the text changed at once
                self.rest = min(4 * self.rest, MAX_REST)
            if is_stale:
                self._measure_anew()
            else:
                self._enter(Mode.rest)
        elif self._rounds >= self.interval:
            is_clear = gain is not None and gain > CLEAR_GAIN
            self.interval = min(max(MIN_INTERVAL, 2 * self.interval * is_clear), MAX_INTERVAL)
            self._enter(Mode.probe)
            for rate in self.plain.values():  # the rounds of the probe count as much as all before
                rate.decay(min(1.0, PROBE_ROUNDS / rate.num_rounds))

    def _measure_anew(self) -> None:
        self._enter(Mode.probe)
        self.plain, self._is_plain_expected = {}, False

    def _judge_trial(self) -> None:
        gain = self.gain
        hope = None
        if gain is not None and self._rounds >= MIN_TRIAL:
            # With a few requests a pass costs less than with all; what it would cost is in the prospect.
            hope = self._prospect if self._is_partial and self._prospect else max(gain, self._prospect)
        if hope is not None and hope >= RETURN_GAIN:
            self._enter(Mode.speculate)
            self.speculative = {}  # those of a few requests
            self.interval, self.rest = MIN_INTERVAL, max(MIN_REST, self.rest // 2)
            return
        is_hopeless = hope is not None and hope < HOPELESS_GAIN
        if is_hopeless or self.balance < 0 or max(self._rounds, self._late_rounds) >= TRIAL_ROUNDS:
            if self._is_concluded:
                self.rest = min((4 if gain is not None and gain < CLEAR_LOSS else 2) * self.rest, MAX_REST)
            self.rest = max(self.rest, REST_PER_CATCH_UP * self._catch_up_rounds)
            self._enter(Mode.rest)
