"""When the fuzzy KV rows of committed text are dropped, so that an exact pass feeds those tokens again.

That pass is the one that feeds the next draft's root anyway. Rounds are counted per request, one per verdict on a
proposal. Source: EasySpec (arXiv 2502.02493, section 4), which calibrates every round.
"""

from __future__ import annotations

from collections import Counter

from actors.drafters.model.config import CalibrationPolicy, PassDrafterConfig


class CalibrationSchedule:
    """Decides once after every verdict on a proposal."""

    def __init__(self, config: PassDrafterConfig) -> None:
        self._policy = config.calibration_policy
        self._every = config.calibrate_every
        self._rounds: Counter[int] = Counter()

    def is_due(self, request_id: int, *, rejected: bool) -> bool:
        """Whether this request's rows are calibrated now; `rejected`: not all of its proposal was accepted."""
        match self._policy:
            case CalibrationPolicy.never:
                return False
            case CalibrationPolicy.mismatch:
                return rejected
        self._rounds[request_id] += 1
        return self._rounds[request_id] % self._every == 0

    def release(self, request_id: int) -> None:
        self._rounds.pop(request_id, None)
