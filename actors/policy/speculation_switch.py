"""The speculation switch: speculation goes on only while it measures faster than plain decoding.

Counts rounds and compares two measured rates; it does not know what a draft is. While speculating, it measures a few
plain rounds now and then (a probe); at rest, it lets the drafter catch up now and then and measures a few rounds of
speculation (a trial). Both become rarer the clearer and the longer the result has been the same: this bounds the cost.
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
    catch_up = "catch_up"  # plain rounds in which the drafter reads the text it missed
    trial = "trial"  # speculation, to measure whether it pays again


PROBE_ROUNDS = 2
TRIAL_ROUNDS = 6
FIRST_PROBE = 6
"""Rounds of speculation before the first probe."""
MIN_INTERVAL, MAX_INTERVAL = 32, 512
"""Rounds of speculation between two probes."""
MIN_REST, MAX_REST = 32, 512
"""Plain rounds between two trials."""
MARGIN = 0.6
"""Speculation ends if its gain is below 1 - `MARGIN` / sqrt(tokens it was measured on)."""
STALE_ROUNDS = 8
"""Rounds after which plain decoding is measured anew before speculation ends: the machine may have become slower."""
CLEAR_GAIN = 1.15
"""From this gain on probes become rarer."""
RETURN_GAIN = 1.02
"""Gain of a trial that ends a rest: a margin, so that noise does not switch back and forth."""
REST_PER_CATCH_UP = 10
"""Rounds of rest, at least, for each round in which the drafter read the text it missed."""
LATE_ROUNDS = 8
"""Rounds in a row that did not wait for their drafts, after which speculation ends: nothing is speculated any more."""
HOPELESS_GAIN = 0.7
"""A trial with a gain below this ends early, and the next one is further off."""


Rates = dict[int, Rate]
"""By the prompt rows that a round read besides, in steps of twice as many: the bit length of their number."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Speculation against plain decoding over rounds that read as many prompt rows; decayed tokens and rounds."""

    gain: float | None
    tokens: float
    num_rounds: float
    num_plain: float


@dataclass(slots=True)
class SpeculationSwitch:
    """Mode of one kind of load, and the rates it follows from."""

    mode: Mode = Mode.speculate
    speculative: Rates = field(default_factory=dict)
    plain: Rates = field(default_factory=dict)
    interval: int = FIRST_PROBE
    rest: int = MIN_REST
    _rounds: int = 0  # since the mode began
    _catch_up_rounds: int = 0
    _late_rounds: int = 0  # in a row

    @property
    def speculates(self) -> bool:
        """Whether the next rounds speculate."""
        return self.mode is Mode.speculate or self.mode is Mode.trial

    def for_similar_load(self) -> SpeculationSwitch:
        """A switch that starts with the conclusion of this one."""
        is_plain = self.mode in (Mode.rest, Mode.catch_up)
        return SpeculationSwitch(Mode.rest if is_plain else Mode.speculate, rest=self.rest)

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
        plain_s = seconds = tokens = num_rounds = num_plain = 0.0
        for kind, rate in self.speculative.items():
            plain = self.plain.get(kind)
            if plain is not None:
                plain_s += rate.tokens.total / plain.per_s  # that plain rounds would need for these tokens
                seconds += rate.seconds.total
                tokens += rate.tokens.total
                num_rounds += rate.num_rounds
                num_plain += plain.num_rounds
        return _Comparison(plain_s / seconds if seconds else None, tokens, num_rounds, num_plain)

    def update(
        self,
        num_tokens: int,
        seconds: float,
        *,
        speculated: bool,
        willing: bool,
        skipped_drafts: bool = False,
        num_prompt_rows: int = 0,
    ) -> None:
        """A round ended. `willing`: some request of it allows speculation.

        `skipped_drafts`: drafts had been ordered, but the round did not wait for them.
        """
        rates, kind = self.speculative if speculated else self.plain, num_prompt_rows.bit_length()
        if kind not in rates:
            rates[kind] = Rate()
        rates[kind].update(num_tokens, seconds)
        if not willing:
            return
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
                self._catch_up_rounds = self._rounds
            case Mode.rest if self._rounds >= self.rest:
                self._enter(Mode.catch_up)
            case Mode.trial:
                self._judge_trial()

    def caught_up(self) -> bool:
        """The drafter has read the text it missed; returns whether a trial begins."""
        if self.mode is not Mode.catch_up:
            return False
        self._enter(Mode.trial)
        self.speculative = {}
        return True

    def _enter(self, mode: Mode) -> None:
        self.mode, self._rounds, self._late_rounds = mode, 0, 0

    def _judge_speculation(self) -> None:
        found = self._compare()
        is_known = found.num_plain > PROBE_ROUNDS - 1 and found.num_rounds > FIRST_PROBE - 1
        gain = found.gain if is_known else None
        if gain is not None and gain < 1 - MARGIN / found.tokens**0.5:
            is_stale = self._rounds > STALE_ROUNDS
            self._enter(Mode.probe if is_stale else Mode.rest)
            if is_stale:
                self.plain = {}
        elif self._rounds >= self.interval:
            is_clear = gain is not None and gain > CLEAR_GAIN
            self.interval = min(max(MIN_INTERVAL, 2 * self.interval * is_clear), MAX_INTERVAL)
            self._enter(Mode.probe)

    def _judge_trial(self) -> None:
        gain = self.gain
        if self._rounds >= TRIAL_ROUNDS and gain is not None and gain >= RETURN_GAIN:
            self._enter(Mode.speculate)
            self.interval, self.rest = MIN_INTERVAL, max(MIN_REST, self.rest // 2)
            return
        is_hopeless = self._rounds >= 2 and gain is not None and gain < HOPELESS_GAIN
        if is_hopeless or max(self._rounds, self._late_rounds) >= TRIAL_ROUNDS:
            self._enter(Mode.rest)
            longer = (4 if is_hopeless else 2) * self.rest
            self.rest = min(max(longer, REST_PER_CATCH_UP * self._catch_up_rounds), MAX_REST)
