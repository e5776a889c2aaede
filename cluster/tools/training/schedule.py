"""How far a training run is, and the learning rate there. Knows no model: a budget and a trapezoid."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """What one training run may spend. Whichever limit is nearer decides; the rate reaches 0 at either."""

    minutes: float
    """Wall-clock limit in minutes, compilation included."""
    steps: int = 0
    """Limit in optimizer steps; 0 for none."""

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            ValueError: there is no positive limit.
        """
        if self.minutes <= 0 or self.steps < 0:
            raise ValueError(f"need minutes > 0 and steps >= 0, got {self.minutes} and {self.steps}")


class Clock:
    """Progress of one run against its budget, from 0 to 1."""

    def __init__(self, budget: Budget) -> None:
        """Start counting now."""
        self._budget = budget
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def progress(self, step: int) -> float:
        """Return the spent part of the budget after `step` steps; 1 or more means the run is over."""
        spent = self.seconds / (60 * self._budget.minutes)
        return max(spent, step / self._budget.steps) if self._budget.steps else spent


def rate_factor(step: int, progress: float, warmup_steps: int, decay_fraction: float) -> float:
    """Return the factor in [0, 1] on the peak learning rate.

    Linear warm-up over `warmup_steps` steps, a plateau, and a linear fall to 0 over the last `decay_fraction` of the
    budget. Both ramps bind, so that a budget shorter than the warm-up still decays.
    """
    warm = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    fall = min(1.0, max(0.0, 1.0 - progress) / decay_fraction) if decay_fraction else 1.0
    return min(warm, fall)
