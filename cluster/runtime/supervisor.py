"""Watches the processes of one engine: ends those that hang, replaces those that ended, gives up when it is too often.

Deaths are told by the backend (within 10 ms), hanging ranks by the coordinator, which hears their heartbeats, and a
hanging coordinator by its own. A successor whose node is gone is asked for again until somebody has room for it; for
one without whom no token is made, only for a while. A drafter that dies too often, or cannot be started, is left out:
tokens are made without it. What a death means for requests is not known here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actors.protocol.membership import Alive, Death, RankLost, Ready, Silent, identity_of
from actors.topology import drafts
from cluster.config.schema import ClusterConfig
from cluster.placement.relocation import NoRoom
from cluster.runtime.backend import Backend

log = logging.getLogger(__name__)

_POLL_S = 0.2
_LOOK_S = 1.0
"""Between two looks at successors that are not ready."""
WINDOW_S = 3600.0
"""Replacements longer ago than this are forgiven."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One process that ended or was ended; `replaced` unless it is left out. Times are CLOCK_MONOTONIC seconds."""

    identity: str
    incarnation: int
    cause: str
    noticed_at: float
    replaced: bool = True


@dataclass(slots=True)
class _Awaited:
    """A successor that has not said yet that it is ready; with an `obstacle` it could not even be started."""

    since: float
    obstacle: str = ""


class Supervisor:
    """A thread from `start` to `stop`; before `begin_replacing`, every death is final.

    `on_lost` hears of a rank that is gone, `on_moved` that the coordinator has another address, `on_final` of a death
    after which nobody is replaced: a line, and a trace.
    """

    def __init__(
        self,
        backend: Backend,
        limits: ClusterConfig,
        *,
        on_lost: Callable[[RankLost], None],
        on_moved: Callable[[str], None],
        on_final: Callable[[str, str], None],
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._max_restarts = limits.max_restarts
        self._silence_s = limits.silence_s if backend.can_kill else 0.0
        self._on_lost = on_lost
        self._on_moved = on_moved
        self._on_final = on_final
        self._facts: Mapping[str, dict[str, object]] | None = None
        self._is_ending = False
        self._incarnations: dict[str, int] = defaultdict(int)
        self._replaced_at: dict[str, list[float]] = defaultdict(list)
        self._hung: set[tuple[str, int]] = set()
        self._awaited: dict[str, _Awaited] = {}
        self._left_out: set[str] = set()
        self._pids: dict[str, int] = {}
        self._looked_at = 0.0
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
        if not alive.waiting and alive.incarnation == self._incarnations["coordinator"]:
            self._awaited.pop("coordinator", None)

    def hear_ready(self, ready: Ready) -> None:
        identity = identity_of(ready.role, ready.rank)
        if ready.incarnation == self._incarnations[identity]:
            self._pids[identity] = int(ready.facts["pid"])
            self._awaited.pop(identity, None)

    def hear_silence(self, silent: Silent) -> None:
        """The coordinator has lost a rank, or does not hear of anybody who plays it."""
        identity = identity_of(silent.role, silent.rank)
        if silent.incarnation is None:
            self._end_unheard(identity)
        else:
            self._end_hanging(identity, silent.incarnation, silent.pid)

    def coordinator_pid(self) -> dict[str, int]:
        """Of the coordinator, once it serves."""
        last = self._coordinator
        return {} if last is None or last.waiting else {last.identity: last.pid}

    def _end_hanging(self, identity: str, incarnation: int, pid: int | None) -> None:
        """A process does not answer. It may be dead by now, and a successor in its place."""
        if self._backend.can_kill and self._incarnations[identity] == incarnation:
            self._hung.add((identity, incarnation))
            self._backend.kill(identity, pid)

    def _end_unheard(self, identity: str) -> None:
        """Whoever plays this part now hangs: it was ready once, or has had time enough to say a first word."""
        if self._facts is None or not self._silence_s or identity in self._left_out:
            return
        incarnation, awaited = self._incarnations[identity], self._awaited.get(identity)
        if awaited is None:
            self._end_hanging(identity, incarnation, self._pids.get(identity))
        elif not awaited.obstacle and time.monotonic() - awaited.since > self._limits.startup_timeout_s / 2:
            self._end_hanging(identity, incarnation, None)

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
                self._end_hanging("coordinator", last.incarnation, last.pid)
            if self._awaited and now - self._looked_at > _LOOK_S and not self._is_ending:
                self._looked_at = now
                self._look_after_awaited()

    def _take(self, death: Death) -> None:
        identity, now = death.identity, time.monotonic()
        incarnation = self._incarnations[identity]
        recent = [at for at in self._replaced_at[identity] if now - at < WINDOW_S]
        if self._is_ending and identity != "coordinator":
            self._tell_of(identity, incarnation)
            return
        if identity in self._awaited and identity in self._backend.stranded():
            self._replace_stranded(identity)
            return
        if self._facts is None or self._is_ending or not self._max_restarts:
            self._on_final(str(death), death.trace)
            return
        cause = "hung and was ended" if (identity, incarnation) in self._hung else death.text
        if len(recent) >= self._max_restarts:
            times = f"replaced {len(recent)} times within the hour (cluster.max_restarts={self._max_restarts})"
            if drafts(identity):
                self._leave_out(identity, f"{cause}; {times}")
            else:
                self._on_final(f"{death}; {times}", death.trace)
            return
        self.incidents.append(Incident(identity, incarnation, cause, now))
        log.warning("%s: %s; replaced (%d of %d)", identity, cause, len(recent) + 1, self._max_restarts)
        self._replaced_at[identity] = [*recent, now]
        self._replace(identity, str(death), death.trace)

    def _leave_out(self, identity: str, cause: str) -> None:
        """Nobody drafts in its place from now on: tokens are made plainly, or the level above drafts by itself."""
        incarnation = self._incarnations[identity]
        self._left_out.add(identity)
        self._awaited.pop(identity, None)
        self.incidents.append(Incident(identity, incarnation, cause, time.monotonic(), replaced=False))
        log.warning("%s: %s; left out from now on", identity, cause)
        self._tell_of(identity, incarnation)

    def _replace_stranded(self, identity: str) -> None:
        """A successor that was to start on a node that is gone is no further death."""
        self.incidents.append(Incident(identity, self._incarnations[identity], "its node is gone", time.monotonic()))
        self._replace(identity, f"{identity}: its node is gone")

    def _replace(self, identity: str, reason: str, trace: str = "") -> None:
        """A successor in place of whoever plays this part now."""
        incarnation = self._incarnations[identity]
        awaited = self._awaited[identity] = _Awaited(time.monotonic())
        self._incarnations[identity] = incarnation + 1
        self._tell_of(identity, incarnation)
        self._start_successor(identity, awaited, reason, trace)

    def _start_successor(self, identity: str, awaited: _Awaited, reason: str, trace: str = "") -> None:
        """Start it if there is room for it, else note what is in its way."""
        address = self._backend.address
        try:
            self._backend.replace(identity, self._incarnations[identity], self._facts.get(identity, {}))
        except NoRoom as obstacle:
            if not awaited.obstacle:
                log.warning("%s", obstacle)
            awaited.obstacle = str(obstacle)
            return
        except Exception as error:
            why = Death.by(identity, error).text
            if drafts(identity):
                self._leave_out(identity, f"its successor cannot be started: {why}")
            else:
                self._on_final(f"{reason}; and cannot be replaced: {why}", trace)
            return
        self._awaited[identity] = _Awaited(time.monotonic())
        if self._backend.address != address:
            # Whoever was told the old address of the coordinator is started again with the one it has now.
            self._on_moved(self._backend.address)
            for rank in [rank for rank in self._facts if rank not in self._left_out]:
                self._replace(rank, f"{rank}: the coordinator is elsewhere")

    def _look_after_awaited(self) -> None:
        stranded = self._backend.stranded()
        for identity, awaited in list(self._awaited.items()):
            if self._awaited.get(identity) is not awaited:
                continue  # it was started again, or has said that it is ready
            if awaited.obstacle:
                self._start_successor(identity, awaited, f"{identity}: its node is gone")
            elif identity in stranded:
                self._replace_stranded(identity)
        if "coordinator" in self._awaited and self._coordinator is None:
            self._end_unheard("coordinator")
        for identity, awaited in list(self._awaited.items()):
            verdict = self._give_up(identity, awaited)
            if verdict:
                self._awaited.pop(identity, None)
                self._on_final(verdict, "")

    def _give_up(self, identity: str, awaited: _Awaited) -> str:
        """Why this successor is waited for no longer, or nothing; without a drafter tokens are made too."""
        waited_s = time.monotonic() - awaited.since
        if drafts(identity):
            return ""
        if identity == "coordinator" and any(not drafts(other) for other in self._awaited if other != identity):
            awaited.since = time.monotonic()  # it cannot serve without them, and they have their own time
            return ""
        if awaited.obstacle and waited_s > self._limits.wait_s:
            return f"{awaited.obstacle} (waited {waited_s:.0f} s for it; cluster.wait_s sets how long)"
        if waited_s > self._limits.startup_timeout_s:
            return (
                f"{identity}: not ready again after {waited_s:.0f} s; look at its log, or raise "
                "cluster.startup_timeout_s"
            )
        return ""

    def _tell_of(self, identity: str, incarnation: int) -> None:
        if identity == "coordinator":
            self._coordinator = None
        else:
            role, _, rank = identity.partition("-")
            self._on_lost(RankLost(role, int(rank), incarnation))
