"""How long the target waits for drafts: what a pass costs, what a draft brings, and how late drafts come.

While the target waits it makes no tokens. For one request waiting pays up to (E - 1) target passes, E being the tokens
of a pass with a draft; in a batch less, since requests that need no draft are held up too. A drafter that usually needs
longer is not waited for at all; one that is late, only for that long. Delays are measured at the coordinator, from an
order to its answer, so they include links and queues. Works on times that the caller measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from actors.policy.estimators import OUTLIER, Ewma

_MEMORY = 0.9
_WINDOW = 8
"""Answers whose delay counts: few, so that a drafter that was late is soon waited for again."""
JITTER_S = 5e-3
"""Least wait where waiting pays: shorter delays come from a busy host."""
HANG_S = 10.0
"""Longest wait where waiting is not weighed: a drafter that takes longer is taken to hang."""


@dataclass(slots=True)
class DraftWait:
    """Unless it `weighs`, the first part of an answer is waited for whatever it costs.

    `longest_draft` is the draft tokens of a proposal at most: what it is expected to bring until it was measured.
    """

    weighs: bool
    longest_draft: int
    _verify_s: Ewma = field(default_factory=lambda: Ewma(_MEMORY, OUTLIER))
    _prefill_s: float = 0.0  # the last pass over prompts; stands for `_verify_s` until that is measured
    _acceptance_len: Ewma = field(init=False)
    _first_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _rest_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def __post_init__(self) -> None:
        self._acceptance_len = Ewma(_MEMORY, mean=1.0 + self.longest_draft, weight=1.0)

    def update_pass(self, seconds: float, *, reads_prompt: bool) -> None:
        if reads_prompt:
            self._prefill_s = seconds
        else:
            self._verify_s.update(seconds)

    def update_acceptance(self, num_tokens: int) -> None:
        """A pass over a draft brought so many tokens, the target's own included."""
        self._acceptance_len.update(num_tokens)

    def update_delay(self, seconds: float, *, is_rest: bool) -> None:
        """Seconds from an order to the first part of its answer, or from that to the rest of it."""
        (self._rest_s if is_rest else self._first_s).append(seconds)

    @property
    def verify_s(self) -> float:
        """Seconds of a target pass that reads no prompt, lately; 0: not known."""
        return self._verify_s.mean

    @property
    def pass_s(self) -> float:
        """Seconds of a target pass, lately."""
        return self._verify_s.mean or self._prefill_s

    def clear_delays(self) -> None:
        """Drop the delays measured before a pause of speculation: their cause may be gone."""
        self._first_s.clear()
        self._rest_s.clear()

    def wait_s(
        self,
        num_expecting: int,
        num_ready: int = 0,
        num_plain: int = 0,
        *,
        has_first_part: bool = False,
        works_ahead: bool = True,
        expected_s: float = 0.0,
    ) -> float:
        """Seconds to wait for the next part of an answer; 0 if the target should verify now.

        `expected_s`: what the decision to draft has reckoned with until the first part comes, if it is known.

        Of the requests of the pass `num_expecting` await a draft, `num_ready` have one, `num_plain` need none. Waiting
        pays if it would have saved time for the recent delays. The first part is judged by what drafts would bring if
        all of their tokens were accepted: whether they bring it is measured by the decision. Where the drafter does not
        work ahead, an answer without its rest is next to nothing, so its rest is judged as its first part is.
        """

        is_rest = has_first_part and works_ahead
        if not (self.weighs or is_rest):
            return HANG_S

        def break_even_s(tokens: float) -> float:
            """Seconds in which the target makes as many tokens as drafts of this acceptance length bring."""
            return num_expecting * (tokens - 1) / (num_ready * tokens + num_expecting + num_plain) * self.pass_s

        lately = break_even_s(self._acceptance_len.mean)
        if is_rest:
            if not _saves(self._rest_s, lately):
                return 0.0
            return max(lately, JITTER_S) if self.weighs else HANG_S
        at_best = break_even_s(1.0 + self.longest_draft)
        if not _saves(self._first_s, at_best):
            return 0.0
        least_s = JITTER_S if num_ready else max(min(OUTLIER * expected_s, at_best), JITTER_S)
        return max(lately if _saves(self._first_s, lately) else at_best, least_s)


def _saves(delays: Collection[float], bound_s: float) -> bool:
    """Whether waiting for at most `bound_s` would have saved time; where the delay was longer, all of it is lost."""
    saved_s = 0.0
    for delay in delays:
        saved_s += bound_s - delay if delay <= bound_s else -bound_s
    return saved_s > 0 or not delays
