"""Waiting for a cluster: as long as allowed, saying what is missing now and then, and no longer."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cluster.config.schema import ClusterConfig, ClusterName
from cluster.placement.nodes import Node
from cluster.runtime import ray_nodes
from cluster.runtime.ray_nodes import await_head, await_layout
from tests.cluster.placement.test_nodes import CONFIG

ONE, TWO = Node("10.0.0.1", "n1", 1), Node("10.0.0.2", "n2", 1)


class Waiting:
    """A cluster whose second node joins at `joins_at`, on a clock of its own."""

    def __init__(self, joins_at: float, **cluster: object) -> None:
        self.now = 0.0
        self.reported: list[str] = []
        self._joins_at = joins_at
        self._config = replace(CONFIG, cluster=replace(CONFIG.cluster, **cluster))

    def place(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_nodes, "free_nodes", self.look)
            patch.setattr(ray_nodes, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
            return await_layout(self._config, self.reported.append)

    def look(self) -> list[Node]:
        return [ONE, TWO] if self.now >= self._joins_at else [ONE]

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("nodes", [0, 2])
def test_waits_for_nodes_and_says_what_is_missing(nodes):
    waiting = Waiting(joins_at=12.0, nodes=nodes)
    assert [place.host for place in waiting.place()] == ["10.0.0.1", "10.0.0.2"]
    assert waiting.now == 12.0 and len(waiting.reported) == 2
    missing = "cluster.nodes=2: only 1 joined: n1 (10.0.0.1)" if nodes else "target.tp: 2 ranks need 2 cores, 1 here"
    assert waiting.reported[0].startswith(f"waiting for 5 s: {missing}")


def test_gives_up_with_the_reason():
    waiting = Waiting(joins_at=100.0, nodes=2, wait_s=30.0)
    with pytest.raises(
        ValueError, match=r"^cluster\.nodes=2: only 1 joined: n1 .*; gave up after 30 s: to wait longer"
    ):
        waiting.place()
    assert len(waiting.reported) == 5


def test_nodes_that_are_enough_are_not_waited_for():
    waiting = Waiting(joins_at=0.0)
    waiting.place()
    assert waiting.now == 0.0 and not waiting.reported


@pytest.mark.extended
def test_a_head_that_comes_late_is_waited_for_and_one_that_never_comes_is_named_soon(monkeypatch):
    monkeypatch.setattr("cluster.runtime.ray_nodes._HEAD_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        existing = ClusterConfig(ClusterName.existing, address=f"127.0.0.1:{port}", wait_s=10_000)
        await_head(existing, print)
    line = rf"^cluster\.address=127\.0\.0\.1:{port}: no Ray listens there \(Connection refused\); gave up after 1 s$"
    with pytest.raises(ValueError, match=line):
        await_head(existing, print)
    late = threading.Timer(0.3, lambda: arrived.append(socket.create_server(("127.0.0.1", port))))
    arrived: list[socket.socket] = []
    late.start()
    await_head(replace(existing, name=ClusterName.slurm), print)
    assert arrived
    arrived[0].close()
