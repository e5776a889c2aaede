"""Which process the supervisor ends, replaces or gives up, and when, in virtual time: its loop runs in the test."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from actors.protocol.membership import Alive, Death, RankLost, Ready, Silent
from cluster.config.schema import ClusterConfig
from cluster.placement.ranks import NoRoom
from cluster.runtime import supervisor as module
from cluster.runtime.supervisor import WINDOW_S, Incident, Supervisor

FACTS = {"target-0": {"pid": 11}, "draft-0": {"pid": 12}}
ROOMY = dict(silence_s=10.0, startup_timeout_s=60.0, wait_s=30.0, max_restarts=2)


class Cluster:
    """A backend without processes and its clock. The test plans what happens when; `log` has what was done when."""

    def __init__(self, monkeypatch, *, can_kill=True, begins=True, **limits) -> None:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.can_kill, self.now = can_kill, 0.0
        self.address = self.next_address = "first"
        self.without_room: set[str] = set()
        self.unable: set[str] = set()
        self.lost: set[str] = set()
        self.log: list[tuple] = []
        self._plan: list[tuple[float, Callable[[], object]]] = []
        self._ended: list[Death] = []
        self.supervisor = Supervisor(
            self,
            ClusterConfig(**(ROOMY | limits)),
            on_lost=lambda lost: self.note("lost", lost),
            on_moved=lambda address: self.note("moved", address),
            on_final=lambda line, trace: self.note("final", line, trace),
        )
        for identity, facts in FACTS.items():
            self.is_ready(identity, **facts)
        if begins:
            self.supervisor.begin_replacing(FACTS)

    def note(self, *what) -> None:
        self.log.append((round(self.now, 1), *what))

    def of(self, *kinds) -> list[tuple]:
        return [entry for entry in self.log if entry[1] in kinds]

    # --- what happens

    def at(self, when: float, call: Callable, *arguments, **options) -> None:
        self._plan.append((when, lambda: call(*arguments, **options)))

    def end(self, identity: str, text: str = "its node died", trace: str = "") -> None:
        self._ended.append(Death(identity, text, trace))

    def is_ready(self, identity: str, incarnation: int = 0, pid: int = 21) -> None:
        role, _, rank = identity.partition("-")
        self.supervisor.observe(Ready(role, int(rank), {"pid": pid}, incarnation=incarnation))

    def beats(self, incarnation: int = 0, *, waiting: bool = False) -> None:
        self.supervisor.observe(Alive("coordinator", 0, incarnation, 7, waiting=waiting))

    def beats_from(self, first: float, until: float) -> None:
        """A heartbeat a second."""
        for i in range(int(until - first) + 1):
            self.at(first + i, self.beats)

    def run(self, until: float) -> Cluster:
        self.at(until, self.supervisor._stopped.set)
        self._plan.sort(key=lambda planned: planned[0])
        self.supervisor._run()
        return self

    # --- the backend

    def deaths(self, timeout_s: float) -> list[Death]:
        self.now += timeout_s
        while self._plan and self._plan[0][0] <= self.now + 1e-6:
            self._plan.pop(0)[1]()
        ended, self._ended = self._ended, []
        return ended

    def replace(self, identity: str, incarnation: int, facts: object) -> None:
        assert facts == FACTS.get(identity, {})
        if identity in self.without_room:
            raise NoRoom(f"{identity}: node n2 is gone")
        if identity in self.unable:
            raise RuntimeError("no such actor")
        self.note("started", identity, incarnation)
        if identity == "coordinator":
            self.address = self.next_address

    def kill(self, identity: str, pid: int | None) -> None:
        self.note("killed", identity, pid)

    def stranded(self) -> set[str]:
        return set(self.lost)


@pytest.fixture(scope="module", autouse=True)
def quick_ends() -> None:
    """In place of that of `tests/cluster/conftest.py`: each look of the supervisor moves a clock of this file."""


@pytest.fixture
def open_cluster(monkeypatch):
    return lambda **options: Cluster(monkeypatch, **options)


def lost(identity: str, incarnation: int = 0) -> RankLost:
    role, _, rank = identity.partition("-")
    return RankLost(role, int(rank), incarnation)


def test_what_dies_is_replaced_and_noted(open_cluster):
    cluster = open_cluster()
    cluster.at(1, cluster.end, "target-0")
    cluster.at(2, cluster.is_ready, "target-0", 1)
    cluster.at(3, cluster.end, "coordinator", "exit code 1")
    cluster.at(4, cluster.beats, 1, waiting=True)
    cluster.at(5, cluster.beats, 1)
    assert cluster.run(13).log == [
        (1.0, "lost", lost("target-0")),
        (1.0, "started", "target-0", 1),
        (3.0, "started", "coordinator", 1),
    ]
    first, second = cluster.supervisor.incidents
    assert first == Incident("target-0", 0, "its node died", pytest.approx(1.0), True)
    assert second == Incident("coordinator", 0, "exit code 1", pytest.approx(3.0), True)
    assert cluster.supervisor.coordinator_pid() == {"coordinator": 7}


@pytest.mark.parametrize("when", ["before", "without", "ending"])
def test_deaths_after_which_nothing_is_replaced(open_cluster, when):
    """These are deaths before the engine runs, with `max_restarts=0`, and while it ends, when ranks may go."""
    cluster = open_cluster(begins=when != "before", max_restarts=2 * (when != "without"))
    if when == "ending":
        cluster.at(0.5, cluster.supervisor.end_replacing)
        cluster.at(0.6, cluster.end, "target-0")
    cluster.at(1, cluster.end, "coordinator", "it failed", "a trace")
    last = (1.0, "final", "coordinator: it failed", "a trace")
    assert cluster.run(9).log == [(0.6, "lost", lost("target-0"))] * (when == "ending") + [last]
    assert not cluster.supervisor.incidents


@pytest.mark.parametrize("identity", ["target-0", "coordinator"])
def test_without_room_for_a_target_or_coordinator_the_engine_ends_after_a_while(open_cluster, identity):
    cluster = open_cluster(wait_s=20.0)
    cluster.without_room.add(identity)
    cluster.at(1, cluster.end, identity)
    cluster.run(60)
    ((at, _, line, _),) = cluster.of("final")
    assert line == f"{identity}: node n2 is gone; gave up after 21 s: to wait longer, raise cluster.wait_s"
    assert 21 < at <= 22.4 and not cluster.of("started")


def test_without_room_for_a_drafter_it_is_awaited_without_end(open_cluster):
    cluster = open_cluster(wait_s=0.5, startup_timeout_s=1.0)
    cluster.without_room.add("draft-0")
    cluster.at(1, cluster.end, "draft-0")
    cluster.at(1000, cluster.without_room.clear)
    cluster.run(1100)
    ((at, *started),) = cluster.of("started")
    assert started == ["started", "draft-0", 1] and 1000 <= at <= 1001.4
    assert len(cluster.supervisor.incidents) == 1 and not cluster.of("final")


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_successor_whose_node_turns_out_to_be_gone_is_started_elsewhere(open_cluster, is_reported):
    """Ray notices late, so the successor was to start on the lost node. That does not count as a second death."""
    cluster = open_cluster(max_restarts=1)
    cluster.at(1, cluster.end, "target-0")
    cluster.at(2, cluster.lost.add, "target-0")
    cluster.at(2.1, lambda: cluster.lost.add("draft-0"))  # that it was ready does not matter to it
    if is_reported:
        cluster.at(2.2, cluster.end, "target-0")
    cluster.at(3.6, cluster.lost.clear)
    cluster.at(4, cluster.is_ready, "target-0", 3 - (not is_reported))
    cluster.run(20)
    started = [(identity, incarnation) for _, _, identity, incarnation in cluster.of("started")]
    assert started == [("target-0", i) for i in range(1, 1 + len(started))] and len(started) >= 2
    causes = [incident.cause for incident in cluster.supervisor.incidents]
    assert causes == ["its node died"] + ["its node is gone"] * (len(started) - 1)
    assert [entry[2] for entry in cluster.of("lost")] == [lost("target-0", i) for i in range(len(started))]
    assert not cluster.of("final")


def test_ranks_with_the_old_address_of_the_coordinator_are_started_again(open_cluster):
    cluster = open_cluster()
    cluster.next_address = "second"
    cluster.at(1, cluster.end, "coordinator")
    cluster.run(5)
    restarted = [entry for name in FACTS for entry in ((1.0, "lost", lost(name)), (1.0, "started", name, 1))]
    assert cluster.log == [(1.0, "started", "coordinator", 1), (1.0, "moved", "second"), *restarted]
    assert len(cluster.supervisor.incidents) == 1, "only one process died"


def test_a_successor_that_does_not_come_ends_the_engine(open_cluster):
    cluster = open_cluster(startup_timeout_s=20.0, silence_s=0.0)
    cluster.at(1, cluster.end, "coordinator")
    cluster.at(2, cluster.beats, 0)  # a late record of the dead one
    cluster.at(3, cluster.beats, 1, waiting=True)
    cluster.run(60)
    ((at, _, line, _),) = cluster.of("final")
    assert line == "coordinator: not ready again after 21 s; look at its log, or raise cluster.startup_timeout_s"
    assert 21 < at <= 22.4


def test_a_coordinator_is_not_blamed_for_the_target_it_waits_for(open_cluster):
    cluster = open_cluster(startup_timeout_s=20.0, silence_s=0.0)
    cluster.at(1, cluster.end, "coordinator")
    cluster.at(12, cluster.end, "target-0")
    cluster.run(100)
    ((at, _, line, _),) = cluster.of("final")
    assert line.startswith("target-0: not ready again after 21 s") and 32 < at <= 33.4


def test_the_time_of_a_coordinator_begins_when_the_target_is_there(open_cluster):
    cluster = open_cluster(startup_timeout_s=20.0, silence_s=0.0)
    cluster.at(1, cluster.end, "coordinator")
    cluster.at(12, cluster.end, "target-0")
    cluster.at(30, cluster.is_ready, "target-0", 1)
    cluster.run(100)
    ((at, _, line, _),) = cluster.of("final")
    assert line.startswith("coordinator: not ready") and 49 < at <= 53


@pytest.mark.parametrize("identity", ["target-0", "coordinator", "draft-0"])
def test_deaths_within_the_window_are_counted(open_cluster, identity):
    """A target or coordinator ends the engine with its third death within the hour, a drafter is left out."""
    cluster = open_cluster(max_restarts=2)

    def die(when, incarnation):
        cluster.at(when, cluster.end, identity)
        if identity == "coordinator":
            cluster.at(when + 1, cluster.beats, incarnation)
        else:
            cluster.at(when + 1, cluster.is_ready, identity, incarnation)

    cluster.supervisor._silence_s = 0.0
    for incarnation, when in enumerate((10, 20, 11 + WINDOW_S, 30 + WINDOW_S, 40 + WINDOW_S), 1):
        die(when, incarnation)
    cluster.run(60 + WINDOW_S)
    assert [when for when, *_ in cluster.of("started")] == [10.0, 20.0, 11.0 + WINDOW_S, 30.0 + WINDOW_S]
    too_often = "its node died; replaced 2 times within the hour (cluster.max_restarts=2)"
    incidents = cluster.supervisor.incidents
    assert [incident.incarnation for incident in incidents] == list(range(4 + (identity == "draft-0")))
    if identity == "draft-0":
        assert not cluster.of("final") and incidents[-1].cause == too_often
        assert [incident.replaced for incident in incidents] == [True] * 4 + [False]
        assert cluster.log[-1] == (40.0 + WINDOW_S, "lost", lost("draft-0", 4))
    else:
        assert cluster.log[-1] == (40.0 + WINDOW_S, "final", f"{identity}: {too_often}", "")


def test_a_drafter_that_was_left_out_stays_out(open_cluster):
    cluster = open_cluster(startup_timeout_s=1000.0)
    cluster.unable.add("draft-0")
    cluster.next_address = "second"
    cluster.at(1, cluster.end, "draft-0")
    cluster.at(2, cluster.supervisor.observe, Silent("draft", 0))
    cluster.at(3, cluster.end, "coordinator")
    cluster.run(100)
    _died, left_out, _ = cluster.supervisor.incidents
    assert left_out.cause == "its successor cannot be started: RuntimeError: no such actor" and not left_out.replaced
    assert [entry[2] for entry in cluster.of("started")] == ["coordinator", "target-0"] and not cluster.of("killed")


def test_a_target_that_cannot_be_started_again_ends_the_engine(open_cluster):
    cluster = open_cluster()
    cluster.unable.add("target-0")
    cluster.at(1, cluster.end, "target-0", trace="a trace")
    line = "target-0: its node died; and cannot be replaced: RuntimeError: no such actor"
    assert cluster.run(5).of("final") == [(1.0, "final", line, "a trace")]


def test_a_rank_without_heartbeats_is_ended_unless_it_is_starting(open_cluster):
    """A rank that froze while there was no coordinator never sent a heartbeat to the new one."""
    cluster = open_cluster(startup_timeout_s=60.0)
    silent = Silent("draft", 0)
    cluster.at(1, cluster.supervisor.observe, silent)
    cluster.at(2, cluster.end, "draft-0")
    cluster.at(3, cluster.supervisor.observe, silent)
    cluster.at(4, cluster.is_ready, "draft-0", 0)  # a late record of the dead one
    cluster.at(31.8, cluster.supervisor.observe, silent)
    assert not cluster.of("killed")
    cluster.at(32.4, cluster.supervisor.observe, silent)  # half of the time for a start has passed
    cluster.at(33, cluster.is_ready, "draft-0", 1, pid=13)
    cluster.at(34, cluster.supervisor.observe, silent)
    cluster.at(35, cluster.supervisor.observe, Silent("draft", 0, 0, 12))  # the first process: gone
    cluster.at(36, cluster.supervisor.observe, Silent("draft", 0, 1, 14))  # its heartbeat gave its number
    cluster.run(40)
    assert cluster.of("killed") == [
        (1.0, "killed", "draft-0", 12),
        (32.4, "killed", "draft-0", None),
        (34.0, "killed", "draft-0", 13),
        (36.0, "killed", "draft-0", 14),
    ]
    assert [incident.cause for incident in cluster.supervisor.incidents] == ["hung and was ended"]


def test_a_successor_is_not_taken_for_one_that_hung(open_cluster):
    cluster = open_cluster()
    cluster.at(1, cluster.supervisor.observe, Silent("draft", 0))
    cluster.at(2, cluster.end, "draft-0", "killed")
    cluster.at(3, cluster.is_ready, "draft-0", 1)
    cluster.at(4, cluster.end, "draft-0", "exit code 1")
    cluster.run(9)
    assert [incident.cause for incident in cluster.supervisor.incidents] == ["hung and was ended", "exit code 1"]


def test_a_coordinator_that_hangs_is_ended(open_cluster):
    cluster = open_cluster(silence_s=10.0)
    cluster.beats_from(1, 20)
    cluster.run(60)
    assert [(kind, identity, pid) for _, kind, identity, pid in cluster.log] == [("killed", "coordinator", 7)]
    assert 30 < cluster.log[0][0] <= 30.4 and cluster.supervisor.coordinator_pid() == {}


def test_a_coordinator_that_freezes_before_its_first_record_is_ended(open_cluster):
    cluster = open_cluster(startup_timeout_s=40.0)
    cluster.at(1, cluster.end, "coordinator")
    cluster.run(23)
    at, *killed = cluster.of("killed")[0]
    assert killed == ["killed", "coordinator", None] and 21 < at <= 22.4


def test_while_this_process_was_suspended_the_coordinator_was_not_silent(open_cluster):
    cluster = open_cluster(silence_s=10.0)

    def suspend():
        cluster.now += 500

    cluster.beats_from(1, 5)
    cluster.at(6, suspend)
    cluster.at(506.5, cluster.beats)
    cluster.run(510)
    assert not cluster.log


@pytest.mark.parametrize("options", [dict(can_kill=False), dict(silence_s=0.0)])
def test_where_silence_means_nothing_no_process_is_ended(open_cluster, options):
    """Threads cannot be ended; `cluster.silence_s=0` switches it off."""
    cluster = open_cluster(**options)
    cluster.at(1, cluster.beats)
    cluster.at(2, cluster.supervisor.observe, Silent("draft", 0))
    assert cluster.run(100).log == []


def test_nothing_is_replaced_while_all_are_ready(open_cluster):
    cluster = open_cluster()
    cluster.at(1, cluster.lost.add, "target-0")
    assert cluster.run(9).log == [] and not cluster.supervisor.incidents


def test_process_ids_are_known_once_the_coordinator_serves(open_cluster):
    cluster = open_cluster()
    assert cluster.supervisor.coordinator_pid() == {}
    cluster.beats(waiting=True)
    assert cluster.supervisor.coordinator_pid() == {}
    cluster.beats()
    assert cluster.supervisor.coordinator_pid() == {"coordinator": 7}


def test_a_successor_that_is_ready_before_its_start_returns_is_awaited_no_longer(open_cluster, monkeypatch):
    cluster = open_cluster(startup_timeout_s=5.0)
    start = cluster.replace

    def start_quickly(identity: str, incarnation: int, facts: object) -> None:
        start(identity, incarnation, facts)
        cluster.is_ready(identity, incarnation)

    monkeypatch.setattr(cluster, "replace", start_quickly)
    cluster.at(1, cluster.end, "target-0")
    assert not cluster.run(30).of("final")


def test_an_error_of_the_backend_ends_the_engine_in_one_line(open_cluster):
    cluster = open_cluster()

    def fail() -> None:
        raise ConnectionError("Ray is gone")

    cluster.at(1, fail)
    ((_, _, line, trace),) = cluster.run(5).of("final")
    assert line == "supervisor: ConnectionError: Ray is gone" and "in deaths" in trace
