"""When a step of draft-ahead would keep the next verdict waiting, and when to tell what is prepared for it.

A pass that is under way when a verdict arrives delays the answer to it, and then the target idles. So the time from an
answer to the record that follows is learned, and a pass that would run into the expected arrival is put off until the
record is there, or is overdue. What is prepared has to be told before that, by as much as it takes to arrive: nobody
can measure that across two hosts' clocks, but whether it was in time shows. Works on times that others read; only
speed depends on it.
"""

from __future__ import annotations

_MEMORY = 0.8
_MEMORY_OF_DELAY = 0.95
_INSTANT_S = 1e-6
SPARE = 5
"""Steps between two records of which one can be spared; where there are fewer, each brings more than it may cost."""


class DraftAheadTiming:
    """Expects records at about the distance from the last answer at which they came before."""

    def __init__(self) -> None:
        self._answered: float | None = None
        self._distance = 0.0
        self._step_s = 0.0
        self._stepped = (0.0, 0.0)
        self._lead_s = 0.0  # by how much earlier than before the last step to tell what is prepared

    @property
    def distance_s(self) -> float:
        """From an answer to the record that follows, as a rule; 0 until one came."""
        return self._distance

    def answered(self, now: float) -> None:
        self._answered = now

    def told_in_time(self) -> None:
        """A proposal was read off what was told."""
        self._lead_s *= _MEMORY_OF_DELAY

    def told_too_late(self) -> None:
        """A proposal was prepared, and had to be asked for."""
        self._lead_s = min(self._lead_s + self._step_s, self._distance)

    def is_time_to_tell(self, now: float) -> bool:
        """Whether what is prepared by now should leave: more may be on its way, but would arrive too late."""
        return self._answered is not None and now > self._answered + self._distance - self._step_s - self._lead_s

    def stepped(self, started: float, finished: float) -> None:
        """A step of draft-ahead was made."""
        self._step_s = _blend(self._step_s, finished - started)
        self._stepped = started, finished

    def arrived(self, now: float) -> None:
        """A record is there. If it came during a step, nobody knows when: half-way is as good a guess as any."""
        if self._answered is None:
            return
        started, finished = self._stepped
        if now - finished < 0.1 * self._step_s:
            now = (started + finished) / 2
        self._distance = _blend(self._distance, now - self._answered)
        self._answered = None

    def pause_s(self, now: float) -> float:
        """Seconds to wait for the record before the next step; 0 if the step fits in, or the record is overdue."""
        if self._answered is None or self._distance < SPARE * self._step_s:
            return 0.0
        due_in = self._answered + self._distance - now
        overdue_in = due_in + self._step_s
        return overdue_in if due_in < self._step_s and overdue_in > _INSTANT_S else 0.0


def _blend(mean: float, value: float) -> float:
    return value if not mean else _MEMORY * mean + (1 - _MEMORY) * value
