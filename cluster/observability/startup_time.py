"""Where the time between the command and the first token goes: named stretches since this process began."""

from __future__ import annotations

import time

import psutil


class StartUp:
    """A stopwatch whose first stretch began with the process."""

    def __init__(self) -> None:
        self._last = psutil.Process().create_time()
        self._stretches: dict[str, float] = {}

    def mark(self, stretch: str) -> None:
        """End a stretch now. A name that was marked before is not changed: start-up happens once."""
        now = time.time()
        self._stretches.setdefault(stretch, now - self._last)
        self._last = now

    def seconds(self, first_token_s: float | None = None) -> dict[str, float]:
        """Stretch -> seconds in their order, and `total`; `first_token_s` is what the first request then took."""
        stretches = dict(self._stretches)
        if first_token_s is not None:
            stretches["first_token"] = first_token_s
        return {**stretches, "total": sum(stretches.values())}
