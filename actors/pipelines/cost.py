"""Running estimates of what a pass costs and what a draft brings, and the one decision they serve: to wait or not."""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 0.9
"""Weight of the past in the running means: about the last ten rounds count."""


@dataclass(slots=True)
class Costs:
    """Means of recent rounds; zero until first measured. Times in seconds."""

    verify_s: float = 0.0
    draft_s: float = 0.0
    acceptance_len: float = 0.0

    def saw_verify(self, seconds: float) -> None:
        self.verify_s = _blend(self.verify_s, seconds)

    def saw_draft(self, seconds: float) -> None:
        self.draft_s = _blend(self.draft_s, seconds)

    def saw_acceptance(self, length: int) -> None:
        self.acceptance_len = _blend(self.acceptance_len, length)

    def worth_waiting(self, num_expecting: int, num_ready: int) -> bool:
        """Whether `num_expecting` drafts, each worth acceptance_len - 1 more tokens, are worth stopping the target for.

        For one request: wait while the delay is below (E - 1) target passes; in a batch the other rows' tokens are
        what the wait costs.
        """
        if not self.verify_s or not self.draft_s or not self.acceptance_len:
            return True
        gain = num_expecting * (self.acceptance_len - 1)
        going_rate = (num_ready * self.acceptance_len + num_expecting) / self.verify_s
        return gain > going_rate * self.draft_s


def _blend(mean: float, value: float) -> float:
    return value if not mean else _MEMORY * mean + (1 - _MEMORY) * value
