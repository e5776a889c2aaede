"""Watches the processes of one engine: kills those that hang, replaces those that ended, ends it after too many deaths.

The backend reports deaths (within 10 ms). The coordinator reports ranks without heartbeats, and its own heartbeats show
whether it hangs. A successor that finds no room is tried again until there is some; a target rank or the coordinator
for at most `cluster.wait_s`, because decoding cannot go on without it. A drafter that dies too often, or cannot be
started, is left out: decoding goes on plainly. What a death means for requests is not known here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from actors.protocol.membership import Alive, Death, RankLost, Ready, Silent, identity_of
from actors.topology import is_draft_role
from cluster.config.schema import ClusterConfig
from cluster.placement.ranks import NoRoom
from cluster.runtime.backend import Backend

log = logging.getLogger(__name__)

COORDINATOR = "coordinator"
_POLL_S = 0.2
_CHECK_S = 1.0
"""Seconds between two checks of successors that are not ready."""
WINDOW_S = 3600.0
"""Replacements longer ago than this do not count."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One process that ended or was ended; `replaced` unless it is left out. Times are CLOCK_MONOTONIC seconds."""

    identity: str
    incarnation: int
    cause: str
    noticed_at: float
    replaced: bool = True


@dataclass(slots=True)
class PendingStart:
    """A successor that is not ready yet; with an `obstacle` it could not be started either."""

    since: float
    obstacle: str = ""


@dataclass(slots=True)
class ProcessState:
    """What the supervisor knows of a rank or the coordinator and of its last process."""

    incarnation: int = 0
    pid: int | None = None
    killed_for: str = ""
    pending: PendingStart | None = None
    is_left_out: bool = False
    replaced_at: list[float] = field(default_factory=list)


class Supervisor:
    """A thread from `start` to `stop` and the next death; before `begin_replacing`, every death is final.

    `on_lost` receives each rank that is gone, `on_moved` a new address of the coordinator, `on_final` a line and a
    trace of a death after which nothing is replaced. `observe` may be called from another thread.
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
        self.incidents: list[Incident] = []
        self._backend = backend
        self._limits = limits
        self._silence_s = limits.silence_s if backend.can_kill else 0.0
        self._on_lost = on_lost
        self._on_moved = on_moved
        self._on_final = on_final
        self._facts: Mapping[str, dict[str, object]] | None = None
        self._is_ending = False
        self._processes: dict[str, ProcessState] = defaultdict(ProcessState)
        self._heartbeat: Alive | None = None  # the coordinator's last one, None once it is gone
        self._heartbeat_at = 0.0
        self._checked_at = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin_replacing(self, facts: Mapping[str, dict[str, object]]) -> None:
        """Replace what dies from now on, since the engine runs; `facts` are what its ranks measured at their start, by
        identity."""
        self._facts = facts

    def end_replacing(self) -> None:
        """The engine is about to end: no rank is replaced any more, and the death of the coordinator is final."""
        self._is_ending = True

    def stop(self) -> None:
        """Nothing is replaced from now on, whatever dies."""
        self._stopped.set()

    def wait(self) -> None:
        """Waits until the thread has ended, which it does after `stop` with the first process that ends."""
        if self._thread.is_alive():
            self._thread.join()

    def coordinator_pid(self) -> dict[str, int]:
        """The coordinator's process id by its identity, once it serves."""
        last = self._heartbeat
        return {} if last is None or last.waiting else {last.identity: last.pid}

    def observe(self, record: object) -> None:
        """Update the processes from a record of the coordinator; records of other kinds change nothing."""
        match record:
            case Alive():
                state = self._processes[COORDINATOR]
                if record.incarnation < state.incarnation:
                    return
                self._heartbeat, self._heartbeat_at = record, time.monotonic()
                if not record.waiting:
                    state.pending = None
            case Ready():
                state = self._processes[identity_of(record.role, record.rank)]
                if record.incarnation == state.incarnation:
                    state.pid, state.pending = record.facts["pid"], None
            case Silent(role, rank, None):
                self._kill_silent(identity_of(role, rank))
            case Silent(role, rank, int(incarnation), pid, why):
                self._kill(identity_of(role, rank), incarnation, pid, why)

    # --- processes that hang ------------------------------------------------------------------------------------------

    def _kill(self, identity: str, incarnation: int, pid: int | None, why: str = "hung") -> None:
        """End a process that does not answer, unless its successor has taken its place already."""
        state = self._processes[identity]
        if self._backend.can_kill and state.incarnation == incarnation:
            state.killed_for = why
            self._backend.kill(identity, pid)

    def _kill_silent(self, identity: str) -> None:
        """End the last process of this identity, which sends no heartbeats, unless it is still starting."""
        state = self._processes[identity]
        if self._facts is None or not self._silence_s or state.is_left_out:
            return
        pending = state.pending
        if pending is None:
            self._kill(identity, state.incarnation, state.pid)
        elif not pending.obstacle and time.monotonic() - pending.since > self._limits.startup_timeout_s / 2:
            self._kill(identity, state.incarnation, None)

    # --- processes that ended -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # what dies from now on would be replaced by nothing
            if not self._stopped.is_set():
                death = Death.by("supervisor", error)
                self._give_up(str(death), death.trace)

    def _watch(self) -> None:
        watched_at = time.monotonic()
        while not self._stopped.is_set():
            deaths = self._backend.deaths(_POLL_S)
            now = time.monotonic()
            # While this process was suspended or starved it could not receive: not the coordinator's silence.
            self._heartbeat_at += max(0.0, now - watched_at - 2 * _POLL_S)
            watched_at = now
            for death in deaths:
                if not self._stopped.is_set():
                    self._on_death(death)
            last = self._heartbeat
            if last is not None and self._silence_s and now - self._heartbeat_at > self._silence_s:
                self._heartbeat = None
                self._kill(COORDINATOR, last.incarnation, last.pid)
            if now - self._checked_at > _CHECK_S and not (self._is_ending or self._stopped.is_set()):
                self._checked_at = now
                self._check_pending()

    def _on_death(self, death: Death) -> None:
        identity, now, limit = death.identity, time.monotonic(), self._limits.max_restarts
        state = self._processes[identity]
        if self._is_ending and identity != COORDINATOR:
            self._report_lost(identity, state.incarnation)
            return
        if state.pending is not None and identity in self._backend.stranded():
            self._replace_stranded(identity)
            return
        if self._facts is None or self._is_ending or not limit:
            self._give_up(str(death), death.trace)
            return
        cause = f"{state.killed_for} and was ended" if state.killed_for else death.text
        state.replaced_at = [at for at in state.replaced_at if now - at < WINDOW_S]
        count = len(state.replaced_at)
        if count >= limit:
            times = f"replaced {count} times within the hour (cluster.max_restarts={limit})"
            if is_draft_role(identity):
                self._leave_out(identity, f"{cause}; {times}")
            else:
                self._give_up(f"{death}; {times}", death.trace)
            return
        self._note(identity, cause)
        log.warning("%s: %s; replaced (%d of %d)", identity, cause, count + 1, limit)
        state.replaced_at.append(now)
        self._replace(identity, str(death), death.trace)

    def _give_up(self, line: str, trace: str) -> None:
        """The engine cannot go on: nothing is watched or replaced any more."""
        self._stopped.set()
        self._on_final(line, trace)

    def _leave_out(self, identity: str, cause: str) -> None:
        """Start no successor: from now on decoding is plain, or the level above drafts by itself."""
        state = self._processes[identity]
        state.is_left_out, state.pending = True, None
        self._note(identity, cause, replaced=False)
        log.warning("%s: %s; left out from now on", identity, cause)
        self._report_lost(identity, state.incarnation)

    def _replace_stranded(self, identity: str) -> None:
        """Restart a successor that was to start on a node that is gone; this does not count as a death."""
        self._note(identity, "its node is gone")
        self._replace(identity, f"{identity}: its node is gone")

    def _note(self, identity: str, cause: str, *, replaced: bool = True) -> None:
        incarnation = self._processes[identity].incarnation
        self.incidents.append(Incident(identity, incarnation, cause, time.monotonic(), replaced))

    def _replace(self, identity: str, reason: str, trace: str = "") -> None:
        state = self._processes[identity]
        lost = state.incarnation
        pending = state.pending = PendingStart(time.monotonic())
        state.incarnation, state.killed_for = lost + 1, ""
        self._report_lost(identity, lost)
        self._start_successor(identity, pending, reason, trace)

    def _start_successor(self, identity: str, pending: PendingStart, reason: str, trace: str = "") -> None:
        """Start it if there is room for it, else note the obstacle."""
        assert self._facts is not None
        state, address = self._processes[identity], self._backend.address
        state.pending = PendingStart(time.monotonic())  # before the start: it may be ready while that returns
        try:
            self._backend.replace(identity, state.incarnation, self._facts.get(identity, {}))
        except NoRoom as obstacle:
            if not pending.obstacle:
                log.warning("%s", obstacle)
            pending.obstacle, state.pending = str(obstacle), pending
            return
        except Exception as error:
            why = Death.by(identity, error).text
            if is_draft_role(identity):
                self._leave_out(identity, f"its successor cannot be started: {why}")
            else:
                self._give_up(f"{reason}; and cannot be replaced: {why}", trace)
            return
        if self._backend.address != address:
            # The other ranks have the old address: start each again with the new one.
            self._on_moved(self._backend.address)
            for rank in [rank for rank in self._facts if not self._processes[rank].is_left_out]:
                self._replace(rank, f"{rank}: the coordinator is elsewhere")

    # --- successors that are not ready --------------------------------------------------------------------------------

    def _pending(self) -> dict[str, PendingStart]:
        return {name: state.pending for name, state in list(self._processes.items()) if state.pending is not None}

    def _check_pending(self) -> None:
        if not (before := self._pending()):
            return
        stranded = self._backend.stranded()
        for identity, pending in before.items():
            if self._processes[identity].pending is not pending:
                continue  # it was started again, or is ready
            if pending.obstacle:
                self._start_successor(identity, pending, f"{identity}: its node is gone")
            elif identity in stranded:
                self._replace_stranded(identity)
        if self._processes[COORDINATOR].pending is not None and self._heartbeat is None:
            self._kill_silent(COORDINATOR)
        for identity, pending in self._pending().items():
            if reason := self._reason_to_give_up(identity, pending):
                self._processes[identity].pending = None
                self._give_up(reason, "")

    def _reason_to_give_up(self, identity: str, pending: PendingStart) -> str:
        """Why this successor is awaited no longer, or ""; a drafter is awaited without end."""
        waited_s = time.monotonic() - pending.since
        if is_draft_role(identity):
            return ""
        if identity == COORDINATOR and any(not is_draft_role(other) for other in self._pending() if other != identity):
            pending.since = time.monotonic()  # it cannot serve without them, and they have their own limit
            return ""
        if pending.obstacle and waited_s > self._limits.wait_s:
            return f"{pending.obstacle}; gave up after {waited_s:.0f} s: to wait longer, raise cluster.wait_s"
        if waited_s > self._limits.startup_timeout_s:
            remedy = "look at its log, or raise cluster.startup_timeout_s"
            return f"{identity}: not ready again after {waited_s:.0f} s; {remedy}"
        return ""

    def _report_lost(self, identity: str, incarnation: int) -> None:
        if identity == COORDINATOR:
            self._heartbeat = None
        else:
            role, _, rank = identity.partition("-")
            self._on_lost(RankLost(role, int(rank), incarnation))
