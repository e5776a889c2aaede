"""How much of prompts a pass reads while other requests decode: for so long none of these gains a token.

Works on rows and seconds that the caller measured; which requests the rows belong to is the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.policy.estimators import OUTLIER, Ewma

_MEMORY = 0.9
MOST_PLAIN = 8
"""Passes without prompts that one with prompts may take in any case: each pass reads all weights, and in small parts
prompts would mostly pay for that."""
LEAST_ROWS = 32
"""Rows of prompts that are read in any case: fewer hardly take less time."""
_LEAST_KNOWN = 16
"""Rows of prompts from which on a pass shows what a row takes."""


@dataclass(slots=True)
class TextPace:
    """What a row of a prompt adds to a pass, lately."""

    _row_s: Ewma = field(default_factory=lambda: Ewma(_MEMORY, OUTLIER))

    def saw_pass(self, seconds: float, num_rows: int, plain_s: float) -> None:
        """A pass took so long with so many rows of prompts; without any, one takes `plain_s`."""
        if num_rows >= _LEAST_KNOWN:
            self._row_s.update(max(0.0, seconds - plain_s) / num_rows)

    def most_rows(self, pass_s: float, plain_s: float) -> int | None:
        """Rows of prompts in a pass of about `pass_s` seconds; None: no bound, with 0, or as long as nothing is
        known."""
        if not (pass_s and self._row_s.mean):
            return None
        pass_s = max(pass_s, MOST_PLAIN * plain_s)
        return max(LEAST_ROWS, int((pass_s - plain_s) / self._row_s.mean))
