"""A direction of a connection between two places: a delay, jitter, and records in the order in which they were sent."""

from __future__ import annotations

import random
from collections.abc import Callable

from cluster.tools.simulation.clock import ARRIVAL, VirtualClock


class VirtualLink:
    """Delivers calls after `delay_s` and an exponential part with the mean `jitter_s`, as a stream of bytes would."""

    def __init__(self, clock: VirtualClock, delay_s: float, jitter_s: float, seed: str) -> None:
        self._clock = clock
        self._delay_s = delay_s
        self._jitter_s = jitter_s
        self._random = random.Random(seed)
        self._last = 0.0

    def send(self, sent: float, deliver: Callable[[], None]) -> None:
        arrives = sent + self._delay_s
        if self._jitter_s:
            arrives += self._random.expovariate(1 / self._jitter_s)
        self._last = max(self._last, arrives)
        self._clock.at(self._last, ARRIVAL, deliver)
