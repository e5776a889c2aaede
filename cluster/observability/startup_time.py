"""Where the time between the command and the first token goes: named phases since this process began."""

from __future__ import annotations

import time

import psutil


class StartUp:
    """A stopwatch whose first phase began with the process."""

    def __init__(self) -> None:
        self._last = psutil.Process().create_time()
        self._phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """End a phase now. A name that was marked before is not changed: start-up happens once."""
        now = time.time()
        self._phases.setdefault(phase, now - self._last)
        self._last = now

    def seconds(self, first_token_s: float | None = None) -> dict[str, float]:
        """Phase -> seconds in their order, and `total`; `first_token_s` is what the first request then took."""
        phases = dict(self._phases)
        if first_token_s is not None:
            phases["first_token"] = first_token_s
        return {**phases, "total": sum(phases.values())}
