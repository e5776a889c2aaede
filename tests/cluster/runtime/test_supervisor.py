"""Successors that cannot be started, or do not become ready: how long they are awaited, and what happens then."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import pytest

from actors.protocol.membership import Alive, Death, RankLost, Ready, Silent
from cluster.config.schema import ClusterConfig
from cluster.placement.relocation import NoRoom
from cluster.runtime import supervisor as module
from cluster.runtime.supervisor import Supervisor

FACTS = {"target-0": {"pid": 11}, "draft-0": {"pid": 12}}
WAIT_S = 10.0


class Cluster:
    """A backend without processes: the test sets deaths, missing room and the next address of the coordinator."""

    can_kill = True
    places = ()

    def __init__(self) -> None:
        self.address = "tcp://first:1"
        self.next_address = self.address
        self.without_room: set[str] = set()
        self.lost: set[str] = set()
        self.unable: set[str] = set()
        self.started: list[tuple[str, int]] = []
        self.killed: list[tuple[str, int | None]] = []
        self.lost_ranks: list[RankLost] = []
        self._deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()

    def end(self, identity: str) -> None:
        self._deaths.put(Death(identity, "its node died"))

    def deaths(self, timeout_s: float) -> list[Death]:
        try:
            return [self._deaths.get(timeout=0.01)]
        except queue.Empty:
            return []

    def replace(self, identity: str, incarnation: int, facts: object) -> None:
        if identity in self.without_room:
            raise NoRoom(f"{identity}: node n2 is gone")
        if identity in self.unable:
            raise RuntimeError("no such actor")
        self.started.append((identity, incarnation))
        if identity == "coordinator":
            self.address = self.next_address

    def kill(self, identity: str, pid: int | None) -> None:
        self.killed.append((identity, pid))

    def stranded(self) -> set[str]:
        return set(self.lost)


@pytest.fixture
def cluster(monkeypatch) -> Cluster:
    monkeypatch.setattr(module, "_CHECK_S", 0.02)
    return Cluster()


@pytest.fixture
def watch(cluster) -> Iterator:
    running: list[Supervisor] = []
    final: queue.SimpleQueue[str] = queue.SimpleQueue()
    moved: list[str] = []

    def begin(**limits: float) -> tuple[Supervisor, queue.SimpleQueue, list[str]]:
        supervisor = Supervisor(
            cluster,
            ClusterConfig(**{"silence_s": 0.0} | limits),
            on_lost=cluster.lost_ranks.append,
            on_moved=moved.append,
            on_final=lambda line, trace: final.put(line),
        )
        for identity, facts in FACTS.items():
            supervisor.observe(ready(identity, **facts))
        supervisor.begin_replacing(FACTS)
        supervisor.start()
        running.append(supervisor)
        return supervisor, final, moved

    yield begin
    for supervisor in running:
        supervisor.stop()


def ready(identity: str, incarnation: int = 0, pid: int = 21) -> Ready:
    role, _, rank = identity.partition("-")
    return Ready(role, int(rank), {"pid": pid}, incarnation=incarnation)


def until(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("identity", ["target-0", "coordinator"])
def test_without_room_for_a_target_or_coordinator_the_engine_ends_after_a_while(cluster, watch, identity):
    _, final, _ = watch(wait_s=0.3)
    cluster.without_room.add(identity)
    cluster.end(identity)
    begun = time.monotonic()
    line = final.get(timeout=WAIT_S)
    assert line == f"{identity}: node n2 is gone (waited 0 s for it; cluster.wait_s sets how long)"
    assert time.monotonic() - begun >= 0.3 and final.empty() and not cluster.started


def test_without_room_for_a_drafter_it_is_awaited_without_end(cluster, watch):
    supervisor, final, _ = watch(wait_s=0.05, startup_timeout_s=0.05)
    cluster.without_room.add("draft-0")
    cluster.end("draft-0")
    time.sleep(0.3)
    assert final.empty() and not cluster.started
    cluster.without_room.clear()
    until(lambda: cluster.started == [("draft-0", 1)])
    assert len(supervisor.incidents) == 1


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_successor_whose_node_turns_out_to_be_gone_is_started_elsewhere(cluster, watch, is_reported):
    """Ray notices late, so the successor was to start on the lost node. That does not count as a second death."""
    supervisor, final, _ = watch(max_restarts=1)
    cluster.end("target-0")
    until(lambda: cluster.started == [("target-0", 1)])
    cluster.lost.add("target-0")
    if is_reported:
        cluster.end("target-0")
    until(lambda: ("target-0", 2) in cluster.started)
    cluster.lost.clear()
    supervisor.observe(ready("target-0", incarnation=2))
    count = len(cluster.started)
    time.sleep(0.1)
    assert len(cluster.started) == count and final.empty()
    assert [incident.cause for incident in supervisor.incidents][:2] == ["its node died", "its node is gone"]


def test_ranks_with_the_old_address_of_the_coordinator_are_started_again(cluster, watch):
    _, final, moved = watch()
    cluster.next_address = "tcp://second:2"
    cluster.end("coordinator")
    until(lambda: len(cluster.started) == 3)
    assert cluster.started == [("coordinator", 1), ("target-0", 1), ("draft-0", 1)]
    assert moved == ["tcp://second:2"] and final.empty()


def test_a_successor_that_does_not_come_ends_the_engine(cluster, watch):
    supervisor, final, _ = watch(startup_timeout_s=0.2)
    for identity in ("target-0", "coordinator"):
        cluster.end(identity)
        until(lambda identity=identity: (identity, 1) in cluster.started)
    supervisor.observe(ready("target-0", incarnation=1))
    supervisor.observe(Alive("coordinator", 0, 0, 7, waiting=False))  # a late record of the dead one
    assert final.get(timeout=WAIT_S) == (
        "coordinator: not ready again after 0 s; look at its log, or raise cluster.startup_timeout_s"
    )
    assert final.empty()


def test_nothing_is_replaced_while_all_are_ready(cluster, watch):
    supervisor, _, _ = watch()
    cluster.lost.add("target-0")
    time.sleep(0.1)
    assert not cluster.started and not supervisor.incidents


def test_a_drafter_that_dies_too_often_is_left_out_and_the_engine_goes_on(cluster, watch):
    supervisor, final, _ = watch(max_restarts=2)
    for incarnation in (1, 2):
        cluster.end("draft-0")
        until(lambda incarnation=incarnation: ("draft-0", incarnation) in cluster.started)
        supervisor.observe(ready("draft-0", incarnation))
    cluster.end("draft-0")
    until(lambda: len(supervisor.incidents) == 3)
    assert [incident.replaced for incident in supervisor.incidents] == [True, True, False]
    last = supervisor.incidents[-1]
    assert last.cause == "its node died; replaced 2 times within the hour (cluster.max_restarts=2)"
    until(lambda: len(cluster.lost_ranks) == 3)
    assert cluster.lost_ranks == [RankLost("draft", 0, incarnation) for incarnation in range(3)]
    cluster.next_address = "tcp://second:2"
    cluster.end("coordinator")
    until(lambda: ("target-0", 1) in cluster.started)
    assert len(cluster.started) == 4 and final.empty(), "nor is it started where the coordinator went"


def test_a_drafter_that_cannot_be_started_again_is_left_out(cluster, watch):
    supervisor, final, _ = watch()
    cluster.unable.add("draft-0")
    cluster.end("draft-0")
    until(lambda: len(supervisor.incidents) == 2)
    last = supervisor.incidents[-1]
    assert last.cause == "its successor cannot be started: RuntimeError: no such actor" and not last.replaced
    assert final.empty()
    cluster.unable.add("target-0")
    cluster.end("target-0")
    line = final.get(timeout=WAIT_S)
    assert line == "target-0: its node died; and cannot be replaced: RuntimeError: no such actor"


@pytest.mark.parametrize("identity, deaths", [("target-0", 3), ("coordinator", 3)])
def test_a_target_or_coordinator_may_not_die_too_often(cluster, watch, identity, deaths):
    _, final, _ = watch(max_restarts=deaths - 1)
    for _ in range(deaths):
        cluster.end(identity)
    assert final.get(timeout=WAIT_S).endswith("replaced 2 times within the hour (cluster.max_restarts=2)")


def test_a_rank_without_heartbeats_is_ended_unless_it_is_starting(cluster, watch):
    """A rank that froze while there was no coordinator never sent a heartbeat to the new one."""
    supervisor, _, _ = watch(silence_s=60.0, startup_timeout_s=120.0)
    supervisor.observe(Silent("draft", 0))
    assert cluster.killed == [("draft-0", 12)]
    cluster.end("draft-0")
    until(lambda: cluster.started == [("draft-0", 1)])
    supervisor.observe(Silent("draft", 0))
    supervisor.observe(ready("draft-0", incarnation=0))
    supervisor.observe(Silent("draft", 0))
    assert len(cluster.killed) == 1, "its successor has just been started; late records of the dead one change nothing"
    supervisor.observe(ready("draft-0", incarnation=1, pid=13))
    supervisor.observe(Silent("draft", 0))
    assert cluster.killed[1:] == [("draft-0", 13)]
    assert supervisor.incidents[0].cause == "hung and was ended"


def test_a_successor_that_freezes_before_its_first_record_is_ended(cluster, watch):
    supervisor, final, _ = watch(silence_s=60.0, startup_timeout_s=1.0)
    cluster.end("draft-0")
    until(lambda: cluster.started == [("draft-0", 1)])
    supervisor.observe(Silent("draft", 0))
    assert not cluster.killed
    until(lambda: supervisor.observe(Silent("draft", 0)) or cluster.killed)
    assert cluster.killed == [("draft-0", None)] and final.empty()


def test_a_coordinator_that_freezes_before_its_first_record_is_ended(cluster, watch):
    watch(silence_s=60.0, startup_timeout_s=2.0)
    cluster.end("coordinator")
    until(lambda: cluster.killed)
    assert cluster.killed[0] == ("coordinator", None)


def test_a_coordinator_is_not_blamed_for_the_target_it_waits_for(cluster, watch):
    _, final, _ = watch(startup_timeout_s=0.5)
    cluster.end("coordinator")
    until(lambda: ("coordinator", 1) in cluster.started)
    time.sleep(0.3)
    cluster.end("target-0")
    assert final.get(timeout=WAIT_S).startswith("target-0: not ready again")
