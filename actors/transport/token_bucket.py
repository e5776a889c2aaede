"""A token bucket: so much at once, and so much a second. Knows nothing of what is spent."""

from __future__ import annotations

from math import inf


class TokenBucket:
    """Holds up to `burst` of what may be spent, refilled with `rate` a second; as much may be owed. Times are of a
    monotonic clock."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, now

    def spend(self, cost: float) -> None:
        self._left = max(self._left - cost, -self._burst)

    def wait_s(self, now: float, least: float = 0.0) -> float:
        """Seconds until `least` is left, by default until nothing is owed; 0 if that is so now."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left >= least:
            return 0.0
        return (least - self._left) / self._rate if self._rate else inf
