"""What the Ray backend asks of Ray, in words and order, without a Ray: who is created where, with what, and ended how.

That Ray does it is shown by `test_ray_backend.py`; another node is lost in `tests/cluster/engine/test_lost_node.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.drafters.config import Placement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import TargetConfig
from actors.worker.ray_actors import SHOW_ALL_GPUS, CoordinatorActor, RankActor
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.placement.nodes import Node
from cluster.placement.ranks import NoRoom, RankPlacement
from cluster.runtime import ray_backend as module
from cluster.runtime.backend import coordinator_spec
from cluster.runtime.ray_backend import RayBackend
from tests.cluster.placement.test_nodes import CONFIG

TARGET = RankPlacement("target", 0, 2, "cuda:0", (), 1, 0.5, "10.0.0.1")
SECOND = replace(TARGET, rank=1, device="cuda:1")
DRAFT = RankPlacement("draft", 0, 1, "cpu", (0, 1), 2, 1.0, "10.0.0.2")
PLACES = [TARGET, SECOND, DRAFT]
ADDRESSES = "tcp://10.0.0.1:70", "tcp://10.0.0.1:71"


class Ray:
    """Stands for Ray, the group of actors and the reservation: `log` has what was asked of them."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.taken: set[str] = set()
        self.addresses = ADDRESSES
        self.fails: BaseException | None = None
        self.room = True
        self.is_up = True

    # --- the actors

    def create(self, identity: str, name: str, kind: Any, *arguments: Any, **options: Any) -> Any:
        if name in self.taken:
            raise ValueError("taken")
        self.log.append(("create", identity, name, kind, arguments, options))
        bind = SimpleNamespace(remote=lambda *facts, **_: self.log.append(("bind", *facts)) or "bound")
        return SimpleNamespace(bind=bind)

    def run(self, identity: str, *arguments: Any) -> None:
        self.log.append(("run", identity, *arguments))

    def kill(self, identity: str) -> None:
        self.log.append(("kill", identity))

    def deaths(self, timeout_s: float) -> list[Any]:
        return [timeout_s]

    def close(self, *, graceful: bool) -> None:
        self.log.append(("close", graceful))

    # --- the reservation

    def reserve(self, places: Any, timeout_s: float, progress: Any = None, *, separately: bool = False) -> None:
        self.log.append(("reserve", [place.identity for place in places], timeout_s, separately))
        if not self.room:
            raise ValueError("cluster: 1 GPU asked")

    def give_back(self, place: RankPlacement) -> None:
        self.log.append(("give back", place.identity, place.host))

    def options(self, place: RankPlacement) -> dict[str, Any]:
        return {"reserved": place.device}

    def release(self) -> None:
        self.log.append(("release",))

    # --- the module

    def get(self, ref: Any, timeout: float) -> Any:
        self.log.append(("get", ref, timeout))
        if self.fails is not None:
            raise self.fails
        return self.addresses

    def is_initialized(self) -> bool:
        return self.is_up

    def shutdown(self) -> None:
        self.log.append(("shutdown",))

    def of(self, *kinds: str) -> list[tuple[Any, ...]]:
        found = [entry for entry in self.log if entry[0] in kinds]
        self.log.clear()
        return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Ray:
    one = Ray()
    for name in ("get", "is_initialized", "shutdown"):
        monkeypatch.setattr(module.ray, name, getattr(one, name))
    monkeypatch.setattr(module, "ActorGroup", lambda: one)
    monkeypatch.setattr(module, "Reservation", lambda: one)
    return one


def backend_of(**cluster: Any) -> RayBackend:
    name = cluster.pop("name", ClusterName.existing)
    config = replace(
        CONFIG,
        target=TargetConfig(tp=2),
        drafter=ModelDrafterConfig(placement=Placement.separate),
        cluster=ClusterConfig(name, address="10.0.0.1:6379" * (name != "local"), port=7, interface="ib0", **cluster),
    )
    return RayBackend(config, Path("logs"))


@pytest.fixture
def started(fake: Ray, monkeypatch: pytest.MonkeyPatch) -> RayBackend:
    monkeypatch.setattr(module, "living_hosts", lambda: {"10.0.0.1", "10.0.0.2"})
    monkeypatch.setattr(module, "free_nodes", lambda: [Node("10.0.0.1", "n1", 4, 2), Node("10.0.0.2", "n2", 4)])
    backend = backend_of(startup_timeout_s=40.0)
    backend.start(coordinator_spec(backend._config, PLACES, (2,)), PLACES)
    return backend


def test_a_start_creates_all_actors_before_it_waits_for_the_address(fake, started):
    assert [entry[:3] for entry in fake.log if entry[0] == "create"] == [
        ("create", "coordinator", "coordinator"),
        *(("create", place.identity, place.identity) for place in PLACES),
    ]
    words = [entry[0] for entry in fake.log]
    assert words == ["create", "bind", "reserve", *["create"] * 3, "get", *["run"] * 4]
    log = {(entry[0], entry[1]): entry[2:] for entry in fake.log if entry[0] in ("create", "get", "run")}
    _, kind, arguments, options = log["create", "coordinator"]
    assert (kind, options["namespace"], options["resources"]) == (CoordinatorActor, "specdec", {"node:10.0.0.1": 0.001})
    assert arguments[0] == "coordinator: pipeline=sync" and arguments[1].directories == (str(Path("logs").absolute()),)
    (bound,) = [entry[1:] for entry in fake.log if entry[0] == "bind"]
    assert bound == ("", (0, 7), started.keys, True, "ib0"), "any port for ranks, the configured one for clients"
    assert [entry[1:] for entry in fake.log if entry[0] == "reserve"] == [
        (["target-0", "target-1", "draft-0"], 40.0, False)
    ]
    assert log["get", "bound"] == (40.0,) and (started.address, started.client_address) == ADDRESSES
    for place in PLACES:
        _, kind, (identity, title, logs, share), options = log["create", place.identity]
        assert (kind, identity, share, logs.level) == (RankActor, place.identity, place.share, "info")
        assert title == started.title(place) and options["reserved"] == place.device
        environment = {"env_vars": SHOW_ALL_GPUS} if place.kind == "cuda" else None
        assert options.get("runtime_env") == environment
        spec, interface = log["run", place.identity]
        assert (spec.identity, spec.hub_address, spec.device, interface) == (
            place.identity,
            ADDRESSES[0],
            place.device,
            "ib0",
        )
        assert spec.key == started.keys.of(place.identity) and spec.eos_token_ids == (2,)
    spec, watches, bound = log["run", "coordinator"]
    assert (spec.target_ranks, spec.draft_ranks, spec.incarnation) == (2, 1, 0) and len(watches) == 1
    assert bound == "bound", "who cannot listen cannot serve"


def test_a_port_that_is_taken_is_named_with_its_option(fake, monkeypatch):
    for cause, line in (("address in use", "cluster.port=7: address in use"), ("cluster.interface=x: no", "cluster.i")):
        fake.fails = ray.exceptions.RayTaskError("bind", "trace", ValueError(cause))
        backend = backend_of()
        with pytest.raises(ValueError, match=f"^{line}"):
            backend.start(coordinator_spec(backend._config, PLACES, ()), PLACES)


def test_a_name_that_is_taken_is_another_engines(fake):
    fake.taken = {"draft-0"}
    backend = backend_of(namespace="mine")
    with pytest.raises(ValueError, match=r"^cluster\.namespace=mine: another engine's draft-0 runs there; close it or"):
        backend.start(coordinator_spec(backend._config, PLACES, ()), PLACES)


def test_a_rank_is_replaced_under_a_new_name_at_its_place(fake, started):
    fake.log.clear()
    started.replace("target-1", 2, {})
    (_, identity, name, kind, _, options), (_, _, spec, interface) = fake.of("create", "run")
    assert (identity, name, kind, interface) == ("target-1", "target-1#2", RankActor, "ib0")
    assert (spec.incarnation, spec.hub_address, spec.device) == (2, ADDRESSES[0], "cuda:1")
    assert options["reserved"] == "cuda:1" and not fake.of("reserve")


def test_a_coordinator_is_replaced_at_its_addresses(fake, started):
    fake.log.clear()
    fake.addresses = "tcp://never:1", "tcp://asked:2"
    started.replace("coordinator", 3, {})
    assert [entry for entry in fake.log if entry[0] == "get"] == [], "nothing waits for it"
    (_, _, name, *_), bind, (_, identity, spec, _, bound) = fake.of("create", "bind", "run")
    assert name == "coordinator#3" and bound == "bound"
    assert bind[1:] == ("10.0.0.1", (70, 71), started.keys, True, "ib0", 10.0)
    assert identity == "coordinator" and spec.incarnation == 3
    assert (started.address, started.client_address) == ADDRESSES


def test_a_rank_whose_node_is_gone_gets_devices_elsewhere_and_the_old_ones_are_returned(fake, started, monkeypatch):
    nodes = [Node("10.0.0.1", "n1", 4), Node("10.0.0.3", "n3", 8)]
    monkeypatch.setattr(module, "free_nodes", lambda: nodes)
    fake.log.clear()
    started.replace("draft-0", 1, {})
    assert fake.log[0] == ("reserve", ["draft-0"], 5.0, True), "each for itself, to be returned alone"
    assert fake.log[1] == ("give back", "draft-0", "10.0.0.2"), "the place that it leaves"
    moved = next(place for place in started.places if place.identity == "draft-0")
    assert moved.host in ("10.0.0.1", "10.0.0.3") and moved.device == "cpu"
    (_, _, spec, _) = fake.of("run")[0]
    assert (spec.device, spec.num_threads) == ("cpu", moved.num_threads)
    fake.room = False
    monkeypatch.setattr(module, "free_nodes", lambda: [Node("10.0.0.4", "n4", 8, 4)])
    with pytest.raises(NoRoom, match=rf"^draft-0: node {moved.host} is gone; cluster: 1 GPU asked$"):
        started.replace("draft-0", 2, {})
    assert [entry[0] for entry in fake.log] == ["reserve"] and moved in started.places, "and nothing is started"


def test_a_coordinator_whose_node_is_gone_binds_anew_on_the_node_of_the_lead(fake, started, monkeypatch):
    monkeypatch.setattr(module, "free_nodes", lambda: [Node("10.0.0.2", "n2", 4), Node("10.0.0.5", "n5", 8, 4)])
    fake.log.clear()
    fake.addresses = "tcp://10.0.0.5:80", "tcp://10.0.0.5:81"
    started.replace("coordinator", 1, {})
    assert {place.host for place in started.places if place.role == "target"} == {"10.0.0.5"}
    created = next(entry for entry in fake.log if entry[0] == "create")
    assert created[1:3] == ("coordinator", "coordinator#1") and created[5]["resources"] == {"node:10.0.0.5": 0.001}
    assert [entry[1:] for entry in fake.log if entry[0] == "bind"] == [("", (0, 7), started.keys, True, "ib0")]
    assert ("get", "bound", 40.0) in fake.log
    assert (started.address, started.client_address) == fake.addresses
    assert [entry[1] for entry in fake.log if entry[0] == "give back"] == ["target-0", "target-1"]


def test_who_is_stranded_is_who_was_on_a_lost_node(started, monkeypatch):
    assert started.stranded() == set()
    monkeypatch.setattr(module, "living_hosts", lambda: {"10.0.0.1"})
    assert started.stranded() == {"draft-0"}
    monkeypatch.setattr(module, "living_hosts", lambda: {"10.0.0.2"})
    assert started.stranded() == {"target-0", "target-1", "coordinator"}
    assert backend_of(name=ClusterName.local).stranded() == set()


def test_a_process_of_this_machine_is_killed_at_once_and_others_by_ray(fake, monkeypatch):
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    for name, pid, by_ray in (("local", 5, False), ("local", None, True), ("existing", 5, True)):
        backend_of(name=ClusterName(name)).kill("draft-0", pid)
        assert (fake.of("kill") == [("kill", "draft-0")]) is by_ray
        assert killed == ([] if by_ray else [(5, signal.SIGKILL)])
        killed.clear()

    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    backend_of(name=ClusterName.local).kill("draft-0", 5)
    assert backend_of().deaths(0.25) == [0.25]


@pytest.mark.parametrize("owns_ray", [True, False])
def test_at_the_end_a_ray_of_its_own_is_shut_down_and_another_gets_its_devices_back(fake, started, owns_ray):
    closed: list[str] = []
    fake.log.clear()
    started._owns_ray = owns_ray
    started._relay = SimpleNamespace(close=lambda: closed.append("relay"))  # pyright: ignore
    started._local_ray = SimpleNamespace(close=lambda: closed.append("local"))  # pyright: ignore
    started.close(graceful=True)
    assert fake.log == [("close", True), ("shutdown",) if owns_ray else ("release",)] and closed == ["relay", "local"]
    fake.log.clear()
    fake.is_up = False
    started.close()
    assert fake.log == [] and closed == ["relay", "local"], "once"


@pytest.fixture
def joined(fake: Ray, monkeypatch: pytest.MonkeyPatch):
    """Connects a backend; returns the options of `ray.init` and what was said."""
    for name in module._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    fake.is_up = False
    said: list[str] = []
    asked: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        asked.append(options)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray does
        if fake.fails is not None:
            raise fake.fails

    @contextlib.contextmanager
    def apart():
        yield lambda: "127.0.0.1:8265"

    local = SimpleNamespace(token_file=Path("/token"), close=lambda: None)
    monkeypatch.setattr(module.ray, "init", init)
    monkeypatch.setattr(module, "LocalRay", lambda: local)
    monkeypatch.setattr(module, "dashboard_apart", apart)
    before = signal.getsignal(signal.SIGTERM)

    def connect(**cluster: Any) -> tuple[dict[str, Any], list[str]]:
        backend = backend_of(**cluster)
        backend._progress = said.append
        try:
            backend.connect()
            assert backend._owns_ray and signal.getsignal(signal.SIGTERM) == before
        finally:
            signal.signal(signal.SIGTERM, before)
            if backend._dashboard is not None:
                while len(said) < 2:
                    assert backend._dashboard.is_alive() and backend._dashboard.daemon
            backend.close()
        return asked[-1], said

    return connect


def test_a_ray_of_its_own_is_started_with_what_the_configuration_says(joined):
    options, said = joined(name=ClusterName.local, num_cpus=3, dashboard=True, namespace="mine")
    assert options == {
        "address": "local",
        "num_cpus": 3,
        "include_dashboard": True,
        "namespace": "mine",
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    assert said == ["starting Ray", "dashboard\n  http://127.0.0.1:8265, its token in /token"]
    assert {name: os.environ[name] for name in module._ENVIRONMENT} == module._ENVIRONMENT
    options, _ = joined(name=ClusterName.local, dashboard=False)
    assert options["num_cpus"] == len(os.sched_getaffinity(0)) and options["include_dashboard"] is False


def test_a_running_ray_is_joined_and_what_the_user_has_set_is_kept(joined, monkeypatch):
    monkeypatch.setenv("RAY_worker_niceness", "5")
    options, said = joined()
    assert options == {
        "address": "10.0.0.1:6379",
        "namespace": "specdec",
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    assert said == ["connecting to Ray at 10.0.0.1:6379"] and os.getenv("RAY_" + "worker_niceness") == "5"


def test_a_sigterm_while_ray_starts_is_handled_as_any_other(fake, joined):
    def handle(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(number)

    signal.signal(signal.SIGTERM, handle)
    fake.fails = SystemExit(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        joined(name=ClusterName.local, dashboard=False)


def test_a_ray_that_does_not_start_is_one_line(fake, joined, monkeypatch):
    fake.fails = RuntimeError("no port\nand more")
    with pytest.raises(
        ValueError, match=r"^cluster\.address: Ray cannot be reached or started \(no port\); see `ray s"
    ):
        joined()
    fake.fails = Exception("The current node timed out during startup.\nand more")  # as on a busy machine
    line = r"^cluster=local: Ray did not start \(The current node timed out during startup\); start again when"
    with pytest.raises(ValueError, match=line):
        joined(name=ClusterName.local, dashboard=False)
    fake.fails = Exception("AF_UNIX path length cannot exceed 107 bytes")
    with pytest.raises(ValueError, match=r"; let RAY_TMPDIR, or TMPDIR, name a folder with a shorter path, or use c"):
        joined(name=ClusterName.local, dashboard=False)
    monkeypatch.setattr(module, "_SHARED_MEMORY", "/nowhere")
    fake.fails = Exception("The current node timed out")
    with pytest.raises(ValueError, match=r"\); make /nowhere writable, or use cluster=inprocess$"):
        joined(name=ClusterName.local, dashboard=False)


def test_a_dashboard_that_does_not_start_is_named_and_nothing_ends(fake):
    backend, said = backend_of(), list[str]()
    backend._progress = said.append
    backend._local_ray = SimpleNamespace(token_file=None)  # pyright: ignore
    backend._closing = SimpleNamespace(is_set=lambda: is_closing, wait=lambda: None)  # pyright: ignore
    is_closing = False

    def start() -> str:
        raise Exception("trace\nno module aiohttp")

    def start_late() -> str:
        raise TimeoutError

    backend._open_dashboard(start)
    backend._open_dashboard(start_late)
    backend._open_dashboard(lambda: "here:1")
    whys = ("no module aiohttp", "TimeoutError")
    assert said == [*(f"the dashboard did not start ({why})" for why in whys), "dashboard\n  http://here:1"]
    said.clear()
    is_closing = True
    backend._open_dashboard(start)
    assert said == [], "Ctrl-C ended it"


def test_who_connected_before_is_not_connected_again(fake, monkeypatch):
    monkeypatch.setattr(module.ray, "init", None)
    backend = backend_of()
    backend.connect()
    assert not backend._owns_ray and threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize(("address", "is_awaited"), [("10.0.0.1:6379", True), ("auto", False), ("a:b", False)])
def test_a_head_is_awaited_where_its_address_is_known(fake, monkeypatch, address, is_awaited):
    asked: list[Any] = []
    monkeypatch.setattr(module, "await_head", lambda cluster, progress: asked.append(cluster.address))
    monkeypatch.setattr(module, "check_admitted", asked.append)
    monkeypatch.setattr(module, "await_layout", lambda config, progress: [config.cluster.address])
    backend = backend_of()
    cluster = replace(backend._config.cluster, address=address)
    backend._config = replace(backend._config, cluster=cluster)
    assert backend.place() == [address] and asked == [address] * 2 * is_awaited


def test_a_ray_of_its_own_has_the_devices_it_was_given(fake, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(module.ray, "cluster_resources", lambda: {"CPU": 1.0, "GPU": 3.0})
    backend = backend_of(name=ClusterName.local)
    config = replace(backend._config, target=TargetConfig(), drafter=NgramDrafterConfig(placement=Placement.separate))
    backend._config = config
    assert [place.device for place in backend.place()] == ["cuda:0", "cpu"]
    monkeypatch.setattr(module.ray, "cluster_resources", lambda: {"CPU": 1.0})
    assert [place.cores for place in backend.place()] == [(cores[0],), ()]
