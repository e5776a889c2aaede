"""The engine on Ray: the same tokens from named processes, deaths that are noticed, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from actors.drafters.config import NoDrafterConfig, Placement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.pool.config import PoolDrafterConfig
from actors.options import PipelineConfig, PipelineName, TargetConfig, VerifyConfig, VerifyRule
from actors.protocol.sampling_params import SamplingParams
from actors.transport.keys import SECRET_BYTES, HubKeys
from actors.worker import openmp
from actors.worker.actor_group import ActorGroup
from actors.worker.ray_actors import CoordinatorActor
from cluster.config.jobs import GenerateConfig, PoolConfig
from cluster.config.schema import ClusterConfig, ClusterName, LaunchConfig, PlacementConfig
from cluster.engine import Engine, EngineError
from cluster.placement.ranks import Devices, lay_out
from cluster.runtime.backend import coordinator_spec
from tests.cluster.engine.test_clients import GREEDY, exchange, tokens_of
from tests.cluster.engine.test_clients import PROMPTS as CLIENT_PROMPTS

pytestmark = pytest.mark.ray

ray = pytest.importorskip("ray")
ROOT = Path(__file__).parents[3]
PROMPTS = ["def median(values):", "x", "class Stack:"]
SHORT = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, seed=4)
LONG = SamplingParams(max_tokens=480, ignore_eos=True)
WAIT_S = 60
CLUSTER = ClusterConfig(ClusterName.local, dashboard=False, num_cpus=4, oversubscribe=True)


@pytest.fixture(scope="module")
def running_ray():
    """One Ray for all tests of this file, started as an engine would start its own."""
    from cluster.runtime.ray_backend import RayBackend

    sections = (
        TargetConfig(),
        NgramDrafterConfig(placement=Placement.separate),
        VerifyConfig(),
        PipelineConfig(),
        PlacementConfig(),
    )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    config = LaunchConfig(*sections, replace(CLUSTER, dashboard=True), GenerateConfig())
    backend = RayBackend(config, progress=lines.put)
    backend.connect()
    yield lines
    backend.close()
    assert not ray.is_initialized()


@pytest.fixture
def launch(tiny_launch, half_agreeing_drafter):
    def make(*, namespace="specdec", **sections):
        drafter = ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=4, device="cpu")
        cluster = replace(CLUSTER, namespace=namespace)
        return tiny_launch(GenerateConfig(), **{"drafter": drafter, "cluster": cluster} | sections)

    return make


@pytest.fixture
def open_engine_on_ray(running_ray, launch):
    engines = []

    def open_(**sections):
        engines.append(Engine(launch(**sections)))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()
    assert not ray.util.list_named_actors(all_namespaces=True), "an actor was left behind"


def status_of(name: str, namespace: str = "specdec") -> str:
    return ray.get(ray.get_actor(name, namespace=namespace).status.remote(), timeout=WAIT_S)


def pid_of(name: str, namespace: str = "specdec") -> int:
    found = re.search(r"pid=(\d+)", status_of(name, namespace))
    assert found is not None
    return int(found[1])


def gone(pid: int) -> bool:
    """Whether a process ended, now or within a moment."""
    try:
        psutil.Process(pid).wait(timeout=WAIT_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def answers(engine: Engine) -> list[list[int]]:
    return [completion.token_ids for sampling in (SHORT, SAMPLED) for completion in engine.generate(PROMPTS, sampling)]


def test_an_actor_shows_in_logs_under_its_name():
    import torch  # noqa: F401 (once it is loaded, a rank leaves the thread settings of this process unchanged)

    from actors.worker.ray_actors import CoordinatorWorker, RankWorker

    assert (repr(RankWorker("draft-0")), repr(CoordinatorWorker())) == ("draft-0", "coordinator")


def listening() -> set[str]:
    """The addresses at which this process and all that it started listen, without those of this machine alone."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [socket for process in processes for socket in process.net_connections("inet")]
    found = {socket.laddr.ip.removeprefix("::ffff:") for socket in sockets if socket.status == psutil.CONN_LISTEN}
    assert "127.0.0.1" in found
    return found - {"127.0.0.1"}


@pytest.mark.extended
def test_a_ray_of_its_own_admits_no_process_without_its_token(running_ray):
    from cluster.runtime.ray_nodes import check_admitted

    token_file, context = Path(os.environ["RAY_AUTH_TOKEN_PATH"]), ray.get_runtime_context()
    token, address = token_file.read_text(), context.gcs_address
    session, deadline, port = Path(context.get_temp_dir(), context.get_session_name()), time.monotonic() + WAIT_S, ""
    while not port.isdigit() and time.monotonic() < deadline:  # its agent may still start
        port = "".join(file.read_text() for file in session.glob("runtime_env_agent_port_*"))

    def asked(**headers: str) -> int:
        """The answer to a request that would run commands; the job API of the dashboard has the same check."""
        request = urllib.request.Request(f"http://127.0.0.1:{port}/get_or_create_runtime_env", b"", headers)
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(request, timeout=WAIT_S)
        return refusal.value.code

    assert (asked(), asked(Authorization=f"Bearer {'0' * 64}")) == (401, 403)
    check_admitted(address)
    script = f"from cluster.runtime.ray_nodes import check_admitted; check_admitted({address!r})"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    options = {"cwd": ROOT, "capture_output": True, "text": True}
    result = subprocess.run([sys.executable, "-c", script], env=clean, check=False, **options)
    assert f"ValueError: cluster.address={address}: that Ray asks for another token; set RAY_AUTH_MODE" in result.stderr
    if os.geteuid() == 0:
        other_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        for reads in (["cat", token_file], ["ls", token_file.parent]):
            result = subprocess.run([*other_user, *reads], check=False, **options)
            assert result.returncode and "Permission denied" in result.stderr and not result.stdout
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert not any(token in word for word in process.cmdline())


@pytest.mark.extended
def test_the_dashboard_starts_beside_the_ranks_and_asks_for_the_token(running_ray):
    assert running_ray.get(timeout=WAIT_S) == "starting Ray"
    found = re.fullmatch(r"dashboard\n  (http://\S+), its token in (\S+)", running_ray.get(timeout=WAIT_S))
    assert found is not None and found[2] == os.environ["RAY_AUTH_TOKEN_PATH"]

    def asked(token: str) -> urllib.request.Request:
        return urllib.request.Request(f"{found[1]}/api/version", headers={"Authorization": f"Bearer {token}"})

    with urllib.request.urlopen(asked(Path(found[2]).read_text()), timeout=WAIT_S) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(asked("0" * 64), timeout=WAIT_S)


def test_tokens_names_and_status(open_engine_on_ray, open_engine, launch):
    plain = open_engine("none")
    expected, of_clients = answers(plain), tokens_of(plain.generate(CLIENT_PROMPTS, GREEDY))
    lookup = NgramDrafterConfig(min_ngram=1, placement=Placement.separate)  # its process starts soonest
    engine = open_engine_on_ray(target=replace(launch().target, tp=2), drafter=lookup)
    names = ["coordinator", "draft-0", "target-0", "target-1"]
    assert sorted(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)) == names
    pids = {name: pid_of(name) for name in names}
    assert len(set(pids.values()) | {os.getpid()}) == 5, "a process each"
    settings = {place.identity: openmp.settings_for(shared=place.share < 1) for place in engine.places}
    assert {identity: ready.facts["openmp"] for identity, ready in engine.ready.items()} == settings
    assert answers(engine) == expected
    assert not listening(), "reached from other machines"
    (store,) = Path(ray.get_runtime_context().get_temp_dir()).glob("store-*/store")
    assert store.parent.stat().st_mode & 0o777 == 0o700, "where the ranks met, no other user can"
    (meeting,) = Path(os.environ["RAY_TMPDIR"]).glob("hub-*")
    ends = [end.laddr for end in psutil.Process(pids["coordinator"]).net_connections("unix")]
    assert ends.count(str(meeting)) == 4, "it listens, and each rank's records come over a connection of this machine"

    running = engine.submit(PROMPTS[0], LONG)
    deadline = time.monotonic() + WAIT_S
    while not running.token_ids and time.monotonic() < deadline:
        time.sleep(0.01)
    statuses = [status_of(name) for name in names]
    assert [status.split()[0] for status in statuses] == names
    assert all(re.fullmatch(r".* round \d+", status) for status in statuses[1:])
    running.abort()
    with pytest.raises(
        ValueError, match=r"^cluster\.namespace=specdec: another engine's coordinator runs there; close it"
    ):
        open_engine_on_ray()
    assert running.result(WAIT_S).finish_reason in ("abort", "length")
    assert answers(engine) == expected, "and is not disturbed by who was refused"
    exchange(engine, of_clients)

    engine.close()
    assert all(gone(pid) for pid in pids.values())
    deadline = time.monotonic() + WAIT_S
    while (free := ray.available_resources().get("CPU")) != 4.0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert free == 4.0, "bundles were given back"


@pytest.mark.extended
def test_a_pool_is_an_actor_group_of_its_own(running_ray, open_engine, launch, tmp_path):
    """It lends its drafter to an engine until its process dies."""
    from ray.util.state import list_actors

    from cluster.pool_on_ray import PoolOnRay

    plain = answers(open_engine("none"))
    sections = {
        "verify": VerifyConfig(VerifyRule.coupled),
        "pipeline": PipelineConfig(PipelineName.branches, adaptive=False),
    }
    of_pool = launch(drafter=replace(launch().drafter, num_threads=1), **sections)
    config, lines, ends = replace(of_pool, job=PoolConfig(listen="tcp://127.0.0.1:*")), list[str](), list[str]()
    with PoolOnRay(config, tmp_path, lines.append) as pool:

        def serve() -> None:
            with pytest.raises(RuntimeError) as error:
                pool.serve(lambda: False)
            ends.append(str(error.value))

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        lent = PoolDrafterConfig("pool", [pool.address], [str(pool.key_file)], 4)
        engine = open_engine(lent, **sections)
        assert ray.util.list_named_actors(all_namespaces=True) == [{"namespace": "specdec-pool", "name": "pool"}]
        shown: list[Any] = list_actors(
            filters=[("state", "=", "ALIVE"), ("class_name", "=", "PoolWorker")], detail=True
        )
        assert [(one.name, one.repr_name) for one in shown] == [("pool", "pool: lends drafter=model, cpu")]
        deadline = time.monotonic() + WAIT_S
        while not sum(one.stats.num_accepted_tokens for one in engine.generate(PROMPTS, SHORT)):
            assert time.monotonic() < deadline
        assert answers(engine) == plain
        while not lines:  # the pool's process is asked for them now and then
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert lines[0] == "1 of 8 leases"
        with pytest.raises(ValueError, match=r"^cluster\.namespace=specdec-pool: another pool runs there; close it"):
            PoolOnRay(config, tmp_path)
        os.kill(pid_of("pool", "specdec-pool"), signal.SIGKILL)
        serving.join(WAIT_S)
        assert ends and ends[0].startswith("the pool's process ended: ")
        assert answers(engine) == plain
    assert not ray.util.list_named_actors(all_namespaces=True)


@pytest.mark.slow
def test_what_the_actor_of_a_pool_refuses_is_refused_here(running_ray, launch, tmp_path):
    """The check is that of a pool without Ray (`test_draft_pools.py`), in a process that loads for seconds."""
    from cluster.pool_on_ray import PoolOnRay

    config = replace(launch(verify=VerifyConfig(VerifyRule.block)), job=PoolConfig(listen="tcp://127.0.0.1:*"))
    with pytest.raises(ValueError, match="^verify=block: a pool's drafts are verified by verify=coupled"):
        PoolOnRay(config, tmp_path)


@pytest.mark.parametrize("opener", ["open_engine", pytest.param("open_engine_on_ray", marks=pytest.mark.slow)])
def test_processes_keep_the_pace_of_their_roles(request, open_engine, launch, opener):
    """Roles run in threads and in processes, which get the same records: plain decoding's tokens, and no round too
    soon."""
    expected = [one.token_ids for one in open_engine("none").generate(PROMPTS[:1], SHORT)]
    base = launch()
    paced = dict(target=replace(base.target, pace_ms=20), drafter=replace(base.drafter, pace_ms={1: 5}))
    engine = request.getfixturevalue(opener)(**paced)
    began = time.monotonic()
    (completion,) = engine.generate(PROMPTS[:1], SHORT)
    rounds = completion.stats.num_spec_steps
    assert [completion.token_ids] == expected and rounds > 0
    assert time.monotonic() - began >= rounds * (0.020 + 0.005)


@pytest.mark.slow
def test_a_request_with_which_the_target_raises_ends_and_its_neighbours_do_not(open_engine_on_ray, launch, monkeypatch):
    """Each failure costs the process of the rank: one in company, one alone.

    By default the same is done to threads (`test_harmful_requests.py`), and processes are killed (`test_drill.py`).
    """
    from actors.worker import ray_actors
    from cluster.runtime import ray_backend

    class RaisingWorker(ray_actors.RankWorker):
        def run(self, spec, interface=""):
            from actors.roles.target import TargetRole

            verify_input = TargetRole._verify_input

            def raising(role, item, **options):
                if role.contexts[item.request_id].admit.sampling.seed == 666:
                    raise RuntimeError("index out of range")
                return verify_input(role, item, **options)

            setattr(TargetRole, "_verify_input", raising)  # noqa: B010  the signature is looser
            return ray_actors.RankWorker.run(self, spec, interface)

    monkeypatch.setattr(ray_backend, "RankActor", ray.remote(**ray_actors._OPTIONS)(RaisingWorker))
    engine = open_engine_on_ray(drafter=NgramDrafterConfig(min_ngram=1, placement=Placement.separate))
    plain = tokens_of(engine.generate(PROMPTS, GREEDY, drafter="none"))
    running = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    with pytest.raises(EngineError, match=r"^target: 2 passes with this request failed \(RuntimeError: index out of"):
        engine.submit("x", replace(GREEDY, seed=666)).result(2 * WAIT_S)
    assert tokens_of(completion.result(WAIT_S) for completion in running) == plain
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == plain
    assert [incident.identity for incident in engine.supervisor.incidents] == ["target-0"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["target-0", "coordinator", "draft-0"])
def test_without_restarts_a_killed_process_ends_what_is_in_flight(open_engine_on_ray, name):
    """Processes die by default in `test_drill.py`, and what is in flight ends in `test_failures.py`."""
    engine = open_engine_on_ray(
        drafter=NgramDrafterConfig(min_ngram=1, placement=Placement.separate), cluster=replace(CLUSTER, max_restarts=0)
    )
    completions = [engine.submit(prompt, LONG) for prompt in PROMPTS]
    os.kill(pid_of(name), signal.SIGKILL)
    for completion in completions:
        with pytest.raises(EngineError, match=f"^{name}: .*died") as caught:
            completion.result(WAIT_S)
        assert "\n" not in str(caught.value)
    with pytest.raises(EngineError, match=f"^{name}: "):
        engine.submit("x", SHORT)


@pytest.mark.slow
def test_engines_of_two_namespaces_run_side_by_side(open_engine_on_ray):
    drafter = NgramDrafterConfig(min_ngram=1, placement=Placement.separate)
    engines = [open_engine_on_ray(namespace=namespace, drafter=drafter) for namespace in ("one", "two")]
    first, second = (answers(engine) for engine in engines)
    assert first == second and pid_of("target-0", "one") != pid_of("target-0", "two")


@pytest.mark.slow
def test_a_rank_that_cannot_load_is_one_line(open_engine_on_ray, tmp_path, launch):
    """As by default one in a thread (`test_failures.py`)."""
    shutil.copytree(launch().target.path, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=rf"^target-0: .*{tmp_path.name}.* holds NaN") as caught:
        open_engine_on_ray(target=TargetConfig(path=str(tmp_path), device="cpu"), drafter=NoDrafterConfig())
    assert "\n" not in str(caught.value)


def test_a_cluster_that_outlives_the_run_keeps_its_artefacts(launch, tmp_path, monkeypatch):
    from cluster.runtime import ray_backend

    monkeypatch.setattr(ray_backend, "session_logs", lambda: tmp_path / "session" / "specdec")
    (tmp_path / "timeline.json").write_text("{}")
    for name, kept in ((ClusterName.local, False), (ClusterName.existing, True)):
        backend = ray_backend.RayBackend(replace(launch(), cluster=ClusterConfig(name, address="auto")))
        backend.publish(tmp_path / "timeline.json")
        assert (tmp_path / "session" / "specdec" / "timeline.json").exists() is kept


def test_titles_say_what_an_actor_does(launch):
    from cluster.runtime.ray_backend import RayBackend

    config = replace(launch(), target=replace(launch().target, tp=2))
    backend, places = RayBackend(config), lay_out(config, Devices((0, 1, 2)))
    titles = [backend.title(place) for place in places]
    assert titles == [
        "target-0: verifies, one of 2 ranks, cpu",
        "target-1: verifies, one of 2 ranks, cpu",
        "draft-0: proposes, drafter=model, cpu",
    ]


@pytest.mark.extended
def test_ranks_that_share_a_device_meet_in_one_bundle(launch):
    """Two GPUs halved between four ranks: each half must be of the GPU in the layout."""
    from cluster.runtime.ray_reservation import device_bundles

    config = launch()
    for section, tp in (("target", {"tp": 2}), ("drafter", {"ranks": 2})):
        config = replace(config, **{section: replace(getattr(config, section), device="cuda", **tp)})
    places = lay_out(config, Devices((0, 1), num_gpus=2))
    assert device_bundles(places) == {("", f"cuda:{i}"): {"GPU": 1.0, "CPU": 0.02} for i in range(2)}
    assert device_bundles(lay_out(launch(), Devices((0, 1)))) == {("", (0, 1)): {"CPU": 2.0}}
    lookup = lay_out(launch(drafter=NgramDrafterConfig(placement=Placement.separate)), Devices((0, 1)))
    assert device_bundles(lookup) == {("", (0, 1)): {"CPU": 2.0}}, "a lookup needs no device"


@pytest.mark.extended
@pytest.mark.parametrize(
    "own, visible, device",
    [("2", None, "cuda:2"), ("5", "4,5,6", "cuda:1"), ("2", "2", "cuda:0"), ("2", "GPU-1f,GPU-2a", "cuda:0")],
)
def test_a_rank_finds_its_gpu_among_those_that_its_process_sees(own, visible, device):
    from actors.worker.ray_actors import visible_device

    assert visible_device(own, visible) == device


@pytest.mark.slow
def test_an_engine_that_starts_ray_ends_it_and_all_its_processes(launch):
    """A whole life in a process of its own: what remains at its end are the processes it began with.

    SIGTERM ends it by the handler of the launch; Ray's own would end the process before anything is written or closed.
    """
    script = f"""
        import os, signal
        import psutil
        from actors.drafters.config import NoDrafterConfig
        from actors.options import PipelineConfig, TargetConfig, VerifyConfig
        from actors.protocol.sampling_params import SamplingParams
        from cluster.config.jobs import GenerateConfig
        from cluster.config.schema import ClusterConfig, ClusterName, LaunchConfig, PlacementConfig
        from cluster.engine import Engine

        config = LaunchConfig(
            TargetConfig(path={launch().target.path!r}, device="cpu"),
            NoDrafterConfig(),
            VerifyConfig(),
            PipelineConfig(),
            PlacementConfig(),
            ClusterConfig(ClusterName.local, dashboard=False, num_cpus=1),
            GenerateConfig(),
        )

        def end(number, frame):
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, end)
        try:
            with Engine(config) as engine:
                (completion,) = engine.generate(["x"], SamplingParams(max_tokens=4, ignore_eos=True))
                during = len(psutil.Process().children(recursive=True))
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
        except KeyboardInterrupt:
            print("interrupted", end=" ")
        psutil.wait_procs(psutil.Process().children(recursive=True), timeout={WAIT_S})
        print(len(completion.token_ids), during > 3, [child.name() for child in psutil.Process().children()])
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.stdout.strip() == "interrupted 4 True []", result.stderr[-2000:]


@ray.remote(max_restarts=0, num_cpus=0)
class Brief:
    def run(self) -> None:
        """Its process goes on."""


def test_a_group_ends_although_an_actor_of_it_was_killed_a_moment_ago(running_ray):
    group = ActorGroup()
    for identity in ("target-0", "draft-0"):
        group.create(identity, f"{identity}#brief", Brief)
        group.run(identity)
    group.kill("target-0")
    group.close(graceful=True)
    assert not ray.util.list_named_actors(all_namespaces=True)


def test_a_coordinator_that_cannot_listen_says_so_as_it_ends(running_ray, launch):
    """A successor may find the port of its predecessor taken by another process."""
    spec = coordinator_spec(launch(), lay_out(launch(), Devices((0, 1), 0)), ())
    group = ActorGroup()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        actor = group.create("coordinator", "coordinator#deaf", CoordinatorActor)
        bound = actor.bind.remote("127.0.0.1", (port, 0), HubKeys(bytes(SECRET_BYTES)), False)
        group.run("coordinator", spec, [], bound)
        (death,) = group.deaths(WAIT_S)
    group.close(graceful=False)
    assert f"cannot listen on tcp://127.0.0.1:{port}" in str(death)
