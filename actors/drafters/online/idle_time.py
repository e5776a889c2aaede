"""When a drafter may learn: while its rank waits for a record, for a share of that time, and so that no record waits.

A step that runs when a record arrives delays the answer to it by at most that one step. So a step begins where it is
expected to end well before the record, or where none is expected; one that does not fit begins at most once a wait.
No step begins unless the delays so far are under `MOST_DELAYED` of all time. Times come from the caller; they
influence speed only.
"""

from __future__ import annotations

from actors.policy.estimators import Ewma

MOST_DELAYED = 0.005
"""Share of the time by which answers may have been delayed."""
FITS = 0.6
"""Share of the time to the expected record that a step may take: rounds differ in length."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1e-4, 0.5
"""Between two looks at whether a step may begin."""


class IdleTime:
    """`share` is of the time in which the rank waits for records."""

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._began = now
        self._waits_since: float | None = now
        self._idle_s = 0.0
        self._step = Ewma(0.9, outlier=4.0)
        self._last_step: tuple[float, float] | None = None  # of this wait
        self.spent_s = 0.0
        self.delayed_s = 0.0
        """Estimate of the time that records waited for a step to end."""

    def answered(self, now: float) -> None:
        """The rank waits for the next record."""
        self._waits_since, self._last_step = now, None

    def record_arrived(self, now: float, due: float | None) -> float:
        """A record was read; returns when it arrived: if a step just ended, when it was `due`, or in the middle of that
        step if it was due later."""
        if self._waits_since is not None:
            self._idle_s += now - self._waits_since
            self._waits_since = None
        started, finished = self._last_step or (0.0, 0.0)
        if self._last_step is None or now - finished > 0.1 * self._step.mean:
            return now
        middle = (started + finished) / 2
        arrived = middle if due is None else min(max(due, started), middle)
        self.delayed_s += finished - arrived
        return arrived

    def learned(self, started: float, finished: float) -> None:
        """A step ran."""
        self._step.update(finished - started)
        self._last_step = started, finished
        self.spent_s += finished - started

    def pause_s(self, now: float, due: float | None, interval_s: float) -> float:
        """Seconds after which to ask again, 0 if a step may begin. `due` is when the next record is expected (None: at
        no time), `interval_s` after the last answer."""
        waited = 0.0 if self._waits_since is None else now - self._waits_since
        if (owed := (self.spent_s + self._step.mean) / self._share - self._idle_s - waited) > 0:
            return min(max(owed, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        if (calm_in := self.delayed_s / MOST_DELAYED - (now - self._began)) > 0:
            return min(max(calm_in, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        left = None if due is None else due - now
        if left is None or left < -interval_s or self._step.mean < FITS * left:
            return 0.0
        if self._last_step is None and self.delayed_s + self._step.mean < MOST_DELAYED * (now - self._began):
            return 0.0
        return min(left + interval_s + SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
