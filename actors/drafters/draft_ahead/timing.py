"""When a pass of draft-ahead may start, and when the coordinator needs to know what draft-ahead has prepared.

A pass that runs when a verdict arrives delays the answer to it, and the target idles for as long. So the drafter learns
the interval from its answer to the next record, and puts off a pass that would run into the expected arrival until the
record is there or is late. A preview of the prepared drafts has to leave before that, by the time it takes to arrive:
clocks of two hosts cannot measure that time, but whether previews arrive in time shows. Of a far drafter most of the
interval is the record's way, so its previews leave within a pass of the target. Times come from the caller; they
influence speed only.
"""

from __future__ import annotations

from math import inf

from actors.policy.estimators import Ewma

_MEMORY = 0.8
_LEAD_MEMORY = 0.95
_LEAST_PAUSE_S = 1e-6
SPARE = 5
"""Passes between two records from which on one pass may be put off; of fewer, each brings more than it may cost."""

SHOWN = 4
"""Previews between two records, at most, where they stream: none is then older than a quarter of a round. Of a far
drafter so many in a round of the target."""
FAR = 1.5
"""Rounds of the target without drafts that pass between two records of a far drafter at least."""


class DraftAheadTiming:
    """Expects the next record as long after an answer as records came before."""

    def __init__(self) -> None:
        self._answered_at: float | None = None  # None: no record is expected
        self._interval = Ewma(_MEMORY)
        self._pass_s = Ewma(_MEMORY)
        self._last_pass = (0.0, 0.0)
        self._lead_s = 0.0  # by how much earlier than before the last pass a preview leaves
        self._shown_at = -inf
        self.round_s = 0.0
        """Seconds of a round of the target without drafts; 0: not known."""
        self.streams = False
        """Previews are for any later verdict, so they leave all the time."""

    @property
    def interval_s(self) -> float:
        """Mean seconds from an answer to the next record; 0 until one came."""
        return self._interval.mean

    def record_answer(self, now: float) -> None:
        self._answered_at = now

    def preview_used(self) -> None:
        """The coordinator read a proposal off a preview."""
        self._lead_s *= _LEAD_MEMORY

    def preview_was_late(self) -> None:
        """A proposal was prepared, but the coordinator had to ask for it."""
        self._lead_s = min(self._lead_s + self._pass_s.mean, self._interval.mean)

    def is_preview_due(self, now: float) -> bool:
        """Whether a preview should leave now: what later passes prepare would arrive too late."""
        if self.streams:
            return now >= self._shown_at + self._interval.mean / SHOWN
        if self._answered_at is None:
            return False
        due_at = self._due_at(self._answered_at)
        was_shown = self._is_far and self._shown_at > due_at and now < self._shown_at + self.round_s / SHOWN
        return now > due_at and not was_shown

    @property
    def _is_far(self) -> bool:
        return 0 < FAR * self.round_s < self._interval.mean

    def _due_at(self, answered_at: float) -> float:
        """When a preview has to leave to be there before the verdict on this answer."""
        until_s = self.round_s if self._is_far else self._interval.mean
        return answered_at + until_s - self._pass_s.mean - self._lead_s

    def record_preview(self, now: float) -> None:
        self._shown_at = now

    def num_passes(self, now: float) -> int:
        """Passes that fit in before a preview is due, at least one: between those the host need not look for a
        record."""
        if self._answered_at is None or not self._pass_s.mean:
            return 1
        due_at = self._due_at(self._answered_at)
        if self.streams:
            due_at = min(due_at, self._shown_at + self._interval.mean / SHOWN)
        return max(1, int(max(0.0, due_at - now) / self._pass_s.mean))

    def record_pass(self, started: float, finished: float, num_passes: int = 1) -> None:
        """A step of draft-ahead of so many passes ended."""
        self._pass_s.update((finished - started) / num_passes)
        self._last_pass = started, finished

    def record_arrival(self, now: float) -> None:
        """A record was read. If it came during a pass, its arrival is taken to be in the middle of that pass."""
        if self._answered_at is None:
            return
        started, finished = self._last_pass
        if now - finished < 0.1 * self._pass_s.mean:
            now = (started + finished) / 2
        self._interval.update(now - self._answered_at)
        self._answered_at = None

    def pause_s(self, now: float) -> float:
        """Seconds to wait for the record before the next pass; 0 if the pass fits in, or the record is late."""
        if self._answered_at is None or self._interval.mean < SPARE * self._pass_s.mean:
            return 0.0
        due_in = self._answered_at + self._interval.mean - now
        late_in = due_in + self._pass_s.mean
        return late_in if due_in < self._pass_s.mean and late_in > _LEAST_PAUSE_S else 0.0
