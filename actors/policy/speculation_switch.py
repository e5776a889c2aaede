"""Never slower for long: speculation goes on only while it measures faster than plain decoding.

Counts rounds and compares two measured rates; it does not know what a draft is. Speculating, it looks now and then at
a few plain rounds; at rest, it lets the drafter catch up now and then and tries a few rounds of speculation. Both
kinds of look become rarer the clearer and the longer the answer has been the same, which bounds what they cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from actors.policy.estimators import Rate


class Mode(StrEnum):
    """What the next rounds are for."""

    speculate = "speculate"
    probe = "probe"  # plain rounds, to know what speculation is compared with
    rest = "rest"  # plain rounds because they are faster
    catch_up = "catch_up"  # the same, while the drafter reads what it missed
    trial = "trial"  # speculation, to know whether it pays again


PROBE_ROUNDS = 2
TRIAL_ROUNDS = 6
FIRST_PROBE = 6
MIN_INTERVAL, MAX_INTERVAL = 32, 512
"""Rounds of speculation between two probes."""
MIN_REST, MAX_REST = 32, 512
"""Plain rounds between two trials."""
DOUBT = 0.6
"""Speculation is slower when it is by more than this over the root of the tokens it was measured on."""
STALE = 8
"""Rounds after which plain decoding is measured anew before speculation ends: the machine may have become slower."""
CLEAR = 1.15
"""Speculation this much faster need not be compared as often."""
RETURN = 1.02
"""A trial must be this much faster to end a rest: else noise would toss it back and forth."""
DEAR = 10
"""Rounds of rest, at least, for each round in which the drafter had to read what it missed."""
LATE_ROUNDS = 8
"""Rounds in a row whose drafts were late or worth no wait, after which speculation ends: it goes on in name only."""
HOPELESS = 0.7
"""A trial this much slower ends early, and the next one is further off."""


@dataclass(slots=True)
class Rates:
    """Tokens per second apart by how much of prompts a round read, in steps of twice as many rows."""

    of: dict[int, Rate] = field(default_factory=dict)

    def update(self, num_tokens: int, seconds: float, num_prompt_rows: int) -> None:
        self.of.setdefault(num_prompt_rows.bit_length(), Rate()).update(num_tokens, seconds)


@dataclass(slots=True)
class SpeculationSwitch:
    """Mode of one kind of load, and the rates it follows from."""

    mode: Mode = Mode.speculate
    speculative: Rates = field(default_factory=Rates)
    plain: Rates = field(default_factory=Rates)
    interval: int = FIRST_PROBE
    rest: int = MIN_REST
    _rounds: int = 0  # since the mode began
    _catch_up_rounds: int = 0
    _late_rounds: int = 0  # in a row

    def like(self) -> SpeculationSwitch:
        """For a load that resembles this one: the same conclusion until its own rounds say otherwise."""
        is_plain = self.mode in (Mode.rest, Mode.catch_up)
        return SpeculationSwitch(Mode.rest if is_plain else Mode.speculate, rest=self.rest)

    @property
    def gain(self) -> float | None:
        """Measured speed of speculation over plain decoding, between rounds that read as much of prompts."""
        both = self._both()
        seconds = sum(rate.seconds.total for rate, _ in both)
        return sum(rate.tokens.total / plain.per_s for rate, plain in both) / seconds if seconds else None

    def findings(self) -> dict[str, str | float | None]:
        """What it measured last and concluded from it; tokens per second of rounds that read no prompts."""
        plain = self.plain.of.get(0)
        return {
            "mode": self.mode.value,
            "plain_tokens_per_s": plain.per_s if plain is not None else None,
            "gain": self.gain,
        }

    def _both(self) -> list[tuple[Rate, Rate]]:
        pairs = ((rate, self.plain.of.get(kind)) for kind, rate in self.speculative.of.items())
        return [(rate, plain) for rate, plain in pairs if plain is not None]

    def update(
        self,
        num_tokens: int,
        seconds: float,
        *,
        speculated: bool,
        willing: bool,
        went_on: bool = False,
        num_prompt_rows: int = 0,
    ) -> None:
        """A round. `willing`: some request of it would be speculated for if the mode allowed it.

        `went_on`: drafts had been asked for, but the round did not wait for them.
        """
        (self.speculative if speculated else self.plain).update(num_tokens, seconds, num_prompt_rows)
        if not willing:
            return
        self._late_rounds = self._late_rounds + 1 if went_on else 0
        self._rounds += speculated == (self.mode in (Mode.speculate, Mode.trial))
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

    def caught_up(self) -> None:
        """The drafter has read what it missed."""
        if self.mode is Mode.catch_up:
            self._enter(Mode.trial)
            self.speculative = Rates()

    def _enter(self, mode: Mode) -> None:
        self.mode, self._rounds, self._late_rounds = mode, 0, 0

    def _judge_speculation(self) -> None:
        tokens = sum(rate.tokens.total for rate, _ in self._both())
        if self._is_known() and self.gain < 1 - DOUBT / tokens**0.5:
            stale = self._rounds > STALE
            self._enter(Mode.probe if stale else Mode.rest)
            if stale:
                self.plain = Rates()
        elif self._rounds >= self.interval:
            clear = self._is_known() and self.gain > CLEAR
            self.interval = min(max(MIN_INTERVAL, 2 * self.interval * clear), MAX_INTERVAL)
            self._enter(Mode.probe)

    def _judge_trial(self) -> None:
        pays = self.gain is not None and self.gain >= RETURN
        if self._rounds >= TRIAL_ROUNDS and pays:
            self._enter(Mode.speculate)
            self.interval, self.rest = MIN_INTERVAL, max(MIN_REST, self.rest // 2)
        elif (hopeless := self._is_hopeless()) or max(self._rounds, self._late_rounds) >= TRIAL_ROUNDS:
            self._enter(Mode.rest)
            longer = (4 if hopeless else 2) * self.rest
            self.rest = min(max(longer, DEAR * self._catch_up_rounds), MAX_REST)

    def _is_hopeless(self) -> bool:
        return self._rounds >= 2 and self.gain is not None and self.gain < HOPELESS

    def _is_known(self) -> bool:
        both = self._both()
        plain, speculative = sum(plain.num_rounds for _, plain in both), sum(rate.num_rounds for rate, _ in both)
        return plain > PROBE_ROUNDS - 1 and speculative > FIRST_PROBE - 1
