"""Running estimates of what a pass costs and what a draft brings, and the decision they serve: to wait, and how long.

Drafts that are awaited cost the tokens the target would make meanwhile. For one request they are worth (E - 1) target
passes, E being the tokens that a pass with a draft brings; in a batch less, since others are held up too. A drafter
that is likely to need longer is not waited for at all, one that is late only for so long. Delays are measured where
the decision is taken, from an order to its answer, so that they hold links and queues. Has no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from actors.policy.estimators import OUTLIER, Ewma

_MEMORY = 0.9
"""Weight of the past in the running means: about the last ten rounds count."""
_WINDOW = 8
"""Answers whose delay counts: so few that a drafter which was late is trusted again soon."""
JITTER_S = 5e-3
"""A drafter that is worth waiting for is given at least so long: for less a system may just have been busy."""
HANG_S = 10.0
"""Where waiting is not weighed, what takes longer is a drafter that hangs."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a target pass that started now could hold, in requests.

    `num_expecting` still wait for a draft, `num_ready` have one, `num_plain` go without; `answered` says that the
    drafter has already sent what it had for the present orders.
    """

    num_expecting: int
    num_ready: int = 0
    num_plain: int = 0
    answered: bool = False


@dataclass(slots=True)
class Costs:
    """Means of recent rounds. Times in seconds.

    Unless it `weighs`, the first answer to an order is worth waiting for whatever it costs.
    """

    weighs: bool = True
    longest_draft: int = 1
    """Draft tokens of a proposal, at most: what it may bring as long as nothing else was measured."""
    verify_s: Ewma = field(default_factory=lambda: Ewma(_MEMORY, OUTLIER))
    _tokens: Ewma = field(init=False)
    _reads_s: float = 0.0  # of passes over prompts, which only stand in for those that decode
    _first_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _rest_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def __post_init__(self) -> None:
        self._tokens = Ewma(_MEMORY, mean=self._hope, weight=1.0)

    def update_verify(self, seconds: float, *, reads_prompt: bool) -> None:
        if reads_prompt:
            self._reads_s = seconds
        else:
            self.verify_s.update(seconds)

    def update_acceptance(self, length: int) -> None:
        self._tokens.update(length)

    def update_delay(self, seconds: float, *, rest: bool) -> None:
        """Seconds from an order to the first answer, or from that to the `rest` of it."""
        (self._rest_s if rest else self._first_s).append(seconds)

    def forget_delays(self) -> None:
        """Drafts are tried again: what made them late may be over."""
        self._first_s.clear()
        self._rest_s.clear()

    def worth_waiting(self, standing: Standing) -> bool:
        """Whether it is cheaper to wait for the next part of an answer than to go on, were it as late as recent ones.

        Of the first part this only says whether it could be worth it if all of it were accepted: what drafts bring at
        other lengths than the present one, nobody measures by not waiting for them. That is the guard's to compare.
        """
        if standing.answered:
            return _saves(self._rest_s, self._bound_s(standing, self.acceptance_len))
        return not self.weighs or _saves(self._first_s, self._bound_s(standing, self._hope))

    def patience_s(self, standing: Standing) -> float:
        """How long to wait if it is worth it: by what drafts bring lately, if they usually come so soon."""
        if not self.weighs:
            return HANG_S
        delays = self._rest_s if standing.answered else self._first_s
        bound_s = self._bound_s(standing, self.acceptance_len)
        if not _saves(delays, bound_s):
            bound_s = self._bound_s(standing, self._hope)
        return max(bound_s, JITTER_S)

    @property
    def acceptance_len(self) -> float:
        """Tokens of a pass with a draft, its own included; the hope counts as one observation, and is forgotten."""
        return self._tokens.mean

    @property
    def _hope(self) -> float:
        return 1.0 + self.longest_draft

    def _bound_s(self, standing: Standing, acceptance_len: float) -> float:
        """Seconds in which the target would make as many tokens without the drafts that are awaited as they bring."""
        gained = standing.num_expecting * (acceptance_len - 1)
        ready, plain = standing.num_ready * acceptance_len, standing.num_expecting + standing.num_plain
        return gained / (ready + plain) * (self.verify_s.mean or self._reads_s)


def _saves(delays: Collection[float], bound_s: float) -> bool:
    """Whether waiting for at most `bound_s` would have saved time: all of it is lost where the delay was longer."""
    return not delays or sum(bound_s - delay if delay <= bound_s else -bound_s for delay in delays) > 0
