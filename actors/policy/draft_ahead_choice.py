"""Whether the drafter should work while the target verifies: the speed of rounds, measured with it and without.

Where the roles have devices of their own, drafting ahead hides the time of drafting. Where they share memory bandwidth
or cores, it also slows the target's pass, and may cost more than it hides. So where passes beside a working drafter
measure longer than plain ones, rounds without draft-ahead are tried; both effects are in the measured rounds.
It counts rounds and compares two rates; it does not know what is prepared, which the drafter decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.policy.estimators import Rate

SLOWED = 1.05
"""Pass beside a working drafter, in plain passes, from which on rounds without draft-ahead are tried."""
FIRST_ROUNDS = 24
"""Rounds with drafting ahead, then as many without, before the first comparison."""
PROBE_ROUNDS = 16
"""Rounds of the slower way, to measure it again."""
SETTLE_ROUNDS = 2
"""Rounds after a change that are not measured: drafts were prepared before it, or nothing was prepared yet."""
MIN_INTERVAL, MAX_INTERVAL = 128, 1024
"""Rounds between two probes: twice as many each time the result is the same."""


@dataclass(slots=True)
class DraftAheadChoice:
    """Of one kind of load. It begins with drafting ahead, as the pipeline says."""

    works_ahead: bool = True
    _rates: dict[bool, Rate] = field(default_factory=lambda: {True: Rate(), False: Rate()})
    _interval: int = MIN_INTERVAL
    _period: int = FIRST_ROUNDS
    _rounds: int = 0  # since the last change
    _best: bool | None = None

    @property
    def gain(self) -> float | None:
        """Measured speed with drafting ahead over that without; None until both are known."""
        ahead, in_turn = self._rates[True].per_s, self._rates[False].per_s
        return ahead / in_turn if ahead and in_turn else None

    def update(self, num_tokens: float, seconds: float, slowdown: float) -> None:
        """A round with drafts ended; `slowdown`: the target's passes beside a working drafter, in plain passes."""
        self._rounds += 1
        if self._rounds > SETTLE_ROUNDS:
            self._rates[self.works_ahead].update(num_tokens, seconds)
        if self._rounds < self._period or (self.works_ahead and slowdown < SLOWED):
            return
        gain, is_probe = self.gain, self.works_ahead is not self._best
        if gain is None:
            self._change(not self.works_ahead, FIRST_ROUNDS)
        elif is_probe:
            best = gain > 1
            self._interval = min(2 * self._interval, MAX_INTERVAL) if best is self._best else MIN_INTERVAL
            self._best = best
            self._change(best, self._interval)
        else:
            self._change(not self.works_ahead, PROBE_ROUNDS)

    def _change(self, works_ahead: bool, period: int) -> None:
        if works_ahead is not self.works_ahead:
            self._rounds, self._period = 0, period
        else:
            self._period = self._rounds + period
        self.works_ahead = works_ahead
