"""When a drafter may learn: while its rank waits for a record, for a share of that time, and so that no record waits.

A step that runs when a record arrives delays the answer to it by at most that one step. While a record is expected, a
step begins where it should end well before; one that does not fit begins at most once a wait; and none begins unless
the delays of such records so far are under `MOST_DELAYED` of all time. Where none is expected, as between requests, a
step begins once the wait has lasted `LONG_WAIT` steps: it delays the next record by a small share of that wait, and
does not count against the limit, which a few slow steps of a busy machine would use up for minutes. Times come from
the caller; they influence speed only.
"""

from __future__ import annotations

from actors.policy.estimators import OUTLIER, Ewma

MOST_DELAYED = 0.005
"""Share of the time by which answers to expected records may have been delayed."""
LONG_WAIT = 10.0
"""Steps that a wait without an expected record lasts before one begins."""
FITS = 0.6
"""Share of the time to the expected record that a step may take: rounds differ in length."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1e-4, 0.5
"""Seconds between two checks of whether a step may begin."""


class IdleTime:
    """`share` is of the time in which the rank waits for records."""

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._began = now
        self._waits_since: float | None = now
        self._interval = Ewma(0.8, OUTLIER)  # a pause between requests says nothing of the target's pass
        self._idle_s = 0.0
        self._step = Ewma(0.9, outlier=4.0)
        self._last_step: tuple[float, float] | None = None  # of this wait
        self.spent_s = 0.0
        self.delayed_s = 0.0
        """Estimate of the time that records waited for a step to end."""
        self._limited_s = 0.0  # of it, that of records that were expected

    def answered(self, now: float) -> None:
        """The rank waits for the next record."""
        self._waits_since, self._last_step = now, None

    def record_arrived(self, now: float) -> float:
        """A record was read; returns when it arrived: if a step just ended, in the middle of that step, or when it was
        due in its first half."""
        began = self._waits_since
        if began is None:
            return now
        arrived = self._arrival(now, began + self._interval.mean)
        self._idle_s += now - began
        self._interval.update(arrived - began)
        self._waits_since = None
        return arrived

    def _arrival(self, now: float, due: float) -> float:
        started, finished = self._last_step or (0.0, 0.0)
        if self._last_step is None or now - finished > 0.1 * self._step.mean:
            return now
        middle = (started + finished) / 2
        arrived = min(due, middle) if due > started else middle
        self.delayed_s += finished - arrived
        if self._is_expected(started):
            self._limited_s += finished - arrived
        return arrived

    def learned(self, started: float, finished: float) -> None:
        """A step ran."""
        self._step.update(finished - started)
        self._last_step = started, finished
        self.spent_s += finished - started

    def pause_s(self, now: float) -> float:
        """Seconds after which to ask again, 0 if a step may begin."""
        waited = 0.0 if self._waits_since is None else now - self._waits_since
        if (owed := (self.spent_s + self._step.mean) / self._share - self._idle_s - waited) > 0:
            return _within_bounds(owed)
        if not self._is_expected(now):
            return _within_bounds(LONG_WAIT * self._step.mean - waited)
        left, allowed_s = self._interval.mean - waited, MOST_DELAYED * (now - self._began)
        if self._limited_s <= allowed_s and self._step.mean < FITS * left:
            return 0.0
        if self._last_step is None and self._limited_s + self._step.mean < allowed_s:
            return 0.0
        return _within_bounds(left + self._interval.mean + SHORTEST_PAUSE_S)

    def _is_expected(self, at: float) -> bool:
        """Whether a record may come then as they came before; one that is late by a whole interval is not expected."""
        return self._waits_since is not None and at - self._waits_since <= 2 * self._interval.mean


def _within_bounds(seconds: float) -> float:
    return min(max(seconds, SHORTEST_PAUSE_S), LONGEST_PAUSE_S) if seconds > 0 else 0.0
