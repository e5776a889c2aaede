"""Watches the processes of one engine: ends those that hang, replaces those that ended, gives up when it is too often.

Deaths are told by the backend (within 10 ms), hanging ranks by the coordinator, which hears their heartbeats, and a
hanging coordinator by its own. What a death means for requests is not known here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actors.levels import is_spared
from actors.lifecycle import Alive, Death, RankLost
from cluster.backends import Backend

log = logging.getLogger(__name__)

_POLL_S = 0.2
WINDOW_S = 3600.0
"""Replacements longer ago than this are forgiven."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One process that ended or was ended. Times are CLOCK_MONOTONIC seconds."""

    identity: str
    incarnation: int
    cause: str
    noticed_at: float


class Supervisor:
    """A thread from `start` to `stop`; before `begin_replacing`, every death is final.

    `on_lost` hears of a rank that is gone, `on_final` of a death after which nobody is replaced: a line, and a trace.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        max_restarts: int,
        silence_s: float,
        on_lost: Callable[[RankLost], None],
        on_final: Callable[[str, str], None],
    ) -> None:
        self._backend = backend
        self._max_restarts = max_restarts
        self._silence_s = silence_s if backend.can_kill else 0.0
        self._on_lost = on_lost
        self._on_final = on_final
        self._facts: Mapping[str, dict[str, object]] | None = None
        self._is_ending = False
        self._incarnations: dict[str, int] = defaultdict(int)
        self._replaced_at: dict[str, list[float]] = defaultdict(list)
        self._hung: set[tuple[str, int]] = set()
        self._coordinator: Alive | None = None
        self._heard_at = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self.incidents: list[Incident] = []

    def start(self) -> None:
        self._thread.start()

    def begin_replacing(self, facts: Mapping[str, dict[str, object]]) -> None:
        """From now on the engine runs; `facts` are what its ranks measured at their start, by identity."""
        self._facts = facts

    def end_replacing(self) -> None:
        """The engine is about to end: nobody is replaced any more, and without a coordinator nothing ends politely."""
        self._is_ending = True

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def hear_coordinator(self, alive: Alive) -> None:
        self._coordinator, self._heard_at = alive, time.monotonic()

    def coordinator_pid(self) -> dict[str, int]:
        """Of the coordinator, once it serves."""
        last = self._coordinator
        return {} if last is None or last.waiting else {last.identity: last.pid}

    def end_hanging(self, identity: str, incarnation: int, pid: int) -> None:
        """A process does not answer. It may be dead by now, and a successor in its place."""
        if self._backend.can_kill and self._incarnations[identity] == incarnation:
            self._hung.add((identity, incarnation))
            self._backend.kill(identity, pid)

    def _watch(self) -> None:
        watched_at = time.monotonic()
        while not self._stopped.is_set():
            deaths = self._backend.deaths(_POLL_S)
            now = time.monotonic()
            # A machine that slept, or was starved, heard nobody: that says nothing about the coordinator.
            self._heard_at += max(0.0, now - watched_at - 2 * _POLL_S)
            watched_at = now
            for death in deaths:
                if not self._stopped.is_set():
                    self._take(death)
            last = self._coordinator
            if last is not None and self._silence_s and now - self._heard_at > self._silence_s:
                self._coordinator = None
                self.end_hanging("coordinator", last.incarnation, last.pid)

    def _take(self, death: Death) -> None:
        identity, now = death.identity, time.monotonic()
        incarnation = self._incarnations[identity]
        recent = [at for at in self._replaced_at[identity] if now - at < WINDOW_S]
        if self._is_ending and identity != "coordinator":
            self._tell_of(identity, incarnation)
            return
        if self._facts is not None and len(recent) >= self._max_restarts and is_spared(identity):
            self.incidents.append(Incident(identity, incarnation, death.text, now))
            log.warning("%s; the level above drafts by itself", death)
            self._tell_of(identity, incarnation)
            return
        if self._facts is None or self._is_ending or not self._max_restarts:
            self._on_final(str(death), death.trace)
            return
        if len(recent) >= self._max_restarts:
            times = f"replaced {len(recent)} times within the hour (cluster.max_restarts={self._max_restarts})"
            self._on_final(f"{death}; {times}", death.trace)
            return
        cause = "hung and was ended" if (identity, incarnation) in self._hung else death.text
        self.incidents.append(Incident(identity, incarnation, cause, now))
        log.warning("%s: %s; replaced (%d of %d)", identity, cause, len(recent) + 1, self._max_restarts)
        self._replaced_at[identity] = [*recent, now]
        self._incarnations[identity] = incarnation + 1
        self._tell_of(identity, incarnation)
        try:
            self._backend.replace(identity, incarnation + 1, self._facts.get(identity, {}))
        except Exception as error:
            self._on_final(f"{death}; and cannot be replaced: {Death.by(identity, error).text}", death.trace)

    def _tell_of(self, identity: str, incarnation: int) -> None:
        if identity == "coordinator":
            self._coordinator = None
        else:
            role, _, rank = identity.partition("-")
            self._on_lost(RankLost(role, int(rank), incarnation))
