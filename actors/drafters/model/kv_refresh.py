"""When the rows that fuzzy passes left in the committed text are dropped, to be fed again by an exact pass.

That pass is the one that feeds the next round's root anyway. Rounds are counted by request, a round being a verdict
on its proposal. Source: EasySpec (arXiv 2502.02493, section 4), which calibrates every round.
"""

from __future__ import annotations

from collections import Counter

from actors.drafters.model.config import CalibrationPolicy, ModelDrafterConfig


class CalibrationSchedule:
    """Asked once after every verdict on a proposal."""

    def __init__(self, config: ModelDrafterConfig) -> None:
        self._policy = config.calibration_policy
        self._every = config.calibrate_every
        self._rounds: Counter[int] = Counter()

    def is_due(self, request_id: int, *, rejected: bool) -> bool:
        """Whether this request's rows are calibrated now; `rejected` if its proposal was not accepted whole."""
        match self._policy:
            case CalibrationPolicy.never:
                return False
            case CalibrationPolicy.mismatch:
                return rejected
        self._rounds[request_id] += 1
        return self._rounds[request_id] % self._every == 0

    def forget(self, request_id: int) -> None:
        self._rounds.pop(request_id, None)
