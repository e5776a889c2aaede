"""Never slower for long: speculation goes on only while it measures faster than plain decoding.

Counts rounds and compares two measured rates; it does not know what a draft is. Speculating, it looks now and then at
a few plain rounds; at rest, it lets the drafter catch up now and then and tries a few rounds of speculation. Both
kinds of look become rarer the clearer and the longer the answer has been the same, which bounds what they cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from actors.pipelines.estimates import Rate


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
HOPELESS = 0.7
"""A trial this much slower ends early."""


@dataclass(slots=True)
class Guard:
    """Mode of one kind of load, and the rates it follows from."""

    mode: Mode = Mode.speculate
    speculative: Rate = field(default_factory=Rate)
    plain: Rate = field(default_factory=Rate)
    interval: int = FIRST_PROBE
    rest: int = MIN_REST
    _rounds: int = 0  # since the mode began
    _catch_up_rounds: int = 0

    def like(self) -> Guard:
        """For a load that resembles this one: the same conclusion until its own rounds say otherwise."""
        is_plain = self.mode in (Mode.rest, Mode.catch_up)
        return Guard(Mode.rest if is_plain else Mode.speculate, rest=self.rest)

    @property
    def gain(self) -> float | None:
        """Measured speed of speculation over plain decoding."""
        if not self.speculative.seconds or not self.plain.seconds:
            return None
        return self.speculative.per_s / self.plain.per_s

    def saw(self, num_tokens: int, seconds: float, *, speculated: bool, willing: bool) -> None:
        """A decoding round. `willing`: some request of it would be speculated for if the mode allowed it."""
        (self.speculative if speculated else self.plain).saw(num_tokens, seconds)
        if not willing:
            return
        self._rounds += speculated == (self.mode in (Mode.speculate, Mode.trial))
        match self.mode:
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
            self.speculative = Rate()

    def _enter(self, mode: Mode) -> None:
        self.mode, self._rounds = mode, 0

    def _judge_speculation(self) -> None:
        if self._is_known() and self.gain < 1 - DOUBT / self.speculative.tokens**0.5:
            stale = self._rounds > STALE
            self._enter(Mode.probe if stale else Mode.rest)
            if stale:
                self.plain = Rate()
        elif self._rounds >= self.interval:
            clear = self._is_known() and self.gain > CLEAR
            self.interval = min(max(MIN_INTERVAL, 2 * self.interval * clear), MAX_INTERVAL)
            self._enter(Mode.probe)

    def _judge_trial(self) -> None:
        pays = self.gain is not None and self.gain >= RETURN
        if self._rounds >= TRIAL_ROUNDS and pays:
            self._enter(Mode.speculate)
            self.interval, self.rest = MIN_INTERVAL, max(MIN_REST, self.rest // 2)
        elif self._rounds >= TRIAL_ROUNDS or (self._rounds >= 2 and self.gain is not None and self.gain < HOPELESS):
            self._enter(Mode.rest)
            self.rest = min(max(2 * self.rest, DEAR * self._catch_up_rounds), MAX_REST)

    def _is_known(self) -> bool:
        return self.plain.weight > PROBE_ROUNDS - 1 and self.speculative.weight > FIRST_PROBE - 1
