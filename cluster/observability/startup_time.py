"""Where the time between the command and the first token goes: named stretches since this process began."""

from __future__ import annotations

import time

import psutil


class StartUp:
    """A stopwatch that was running before it was made: its first stretch begins with the process."""

    def __init__(self) -> None:
        self._last = psutil.Process().create_time()
        self._stretches: dict[str, float] = {}

    def mark(self, stretch: str) -> None:
        """The stretch of this name ends now. Later marks of the same name say nothing: start-up happens once."""
        now = time.time()
        if stretch not in self._stretches:
            self._stretches[stretch] = now - self._last
        self._last = now

    def seconds(self, first_token_s: float | None = None) -> dict[str, float]:
        """Stretch -> seconds, in their order, and their sum; `first_token_s` is what the first request then took."""
        stretches = dict(self._stretches)
        if first_token_s is not None:
            stretches["first_token"] = first_token_s
        return {**stretches, "total": sum(stretches.values())}
