"""Kill and freeze every kind of process under load: every request keeps its tokens, and no process is left behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelsPlacement
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, PipelineName
from actors.protocol.messages import SamplingParams
from cluster.config.jobs import DrillConfig
from cluster.config.schema import ClusterConfig, ClusterName
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.tools.chaos.drill import Drill, Strike, TokenGap, plan_faults
from tests.cluster.config.quick_loading import load_quickly

PROMPTS = [Prompt(text) for text in ("def median(values):", "x", "class Stack:\n    def push", "for i in range(10):")]
SAMPLING = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.7, seed=5)
ROOT = Path(__file__).parents[4]
SIGNALS = ["SIGKILL", "SIGSTOP"]


def three_levels(drafter: Path) -> CascadeDrafterConfig:
    """Every level a process of its own."""
    levels = [ModelDrafterConfig(path=str(drafter), num_draft_tokens=length, device="cpu") for length in (2, 3, 4)]
    return CascadeDrafterConfig(levels=levels, num_draft_tokens=4, placement=LevelsPlacement.separate)


def test_every_process_meets_every_signal_equally_often():
    identities = ["coordinator", "draft-0", "target-0"]
    planned = plan_faults(identities, SIGNALS, 13, random.Random(0))
    counts = Counter(planned)
    assert len(planned) == 13 and len(counts) == 6 and set(counts.values()) == {2, 3}
    assert planned != plan_faults(identities, SIGNALS, 13, random.Random(1))


def test_pairs_are_two_roles_at_once_with_any_signals():
    identities = ["coordinator", "draft-0", "target-0", "target-1"]
    planned = plan_faults(identities, SIGNALS, 40, random.Random(0), pairs=0.5)
    pairs = Counter(strikes for strikes in planned if len(strikes) == 2)
    assert len(planned) == 40 and len(pairs) == 20 and set(pairs.values()) == {1}, "five pairs of two roles, by four"
    assert all(first[0][:6] != second[0][:6] for first, second in pairs)


def test_a_gap_is_the_longest_time_between_tokens_from_the_fault_on():
    gap = TokenGap(since=10.0)
    for at in (9.0, 10.5, 10.5, 13.0, 14.0):
        gap.update(at)
    assert (gap.longest, gap.since) == (2.5, 14.0)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["cluster=inprocess"], "cluster=inprocess: has no processes"),
        (["cluster.silence_s=0.3"], "cluster.silence_s=0.3: must be 0 (never) or at least 1"),
        (["cluster.silence_s=0"], "cluster.silence_s=0.0: must be above 0 for job=drill"),
        (["cluster.max_restarts=-1"], "cluster.max_restarts=-1: must be 0"),
        (["job.signals=[SIGHUP]"], "job.signals=['SIGHUP']: must all be among SIGKILL"),
        (["job.pairs=1.5"], "job.pairs=1.5: must be between 0 and 1"),
        (["job.faults=0"], "job.faults=0: must be at least 1"),
    ],
)
def test_refusals(overrides, line):
    with pytest.raises(ValueError) as caught:
        load_quickly(["job=drill", *overrides])
    assert str(caught.value).startswith(line)


def await_(happened) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def run_drill(
    launch,
    log_dir: Path,
    plan: Callable[[list[str]], list[tuple[Strike, ...]]],
    pipeline: str,
    *,
    tp: int,
    spacing_s: float,
    silence_s: float = 2.0,
    **sections: object,
) -> Drill:
    """A drill on an engine with a Ray of its own; checks that it leaves no process, port or shared memory.

    The pool is a little too small for the four requests at the end: they fill it to the last slot, and a target that
    had lost one would fail.
    """
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cluster = ClusterConfig(
        ClusterName.local,
        dashboard=False,
        num_cpus=5,
        oversubscribe=True,
        port=port,
        max_restarts=99,
        silence_s=silence_s,
        startup_timeout_s=120,
    )
    # the guard would rest: for models this small, speculation does not pay
    chosen = PipelineConfig(PipelineName(pipeline), adaptive=False)
    config = launch(DrillConfig(), cluster=cluster, pipeline=chosen, **sections)
    config = replace(config, target=replace(config.target, tp=tp, kv_slots=1_400))
    before = shared_memory(), {child.pid for child in psutil.Process().children(recursive=True)}
    with Engine(config, log_dir=log_dir) as engine:
        plain = engine.generate([prompt.content for prompt in PROMPTS], SAMPLING, drafter="none")
        drill = Drill(engine, PROMPTS, SAMPLING, [one.token_ids for one in plain])
        planned = plan(sorted(engine.pids()))
        drill.run(planned, DrillConfig(concurrency=3, spacing_s=spacing_s), lambda _: None)
        again = engine.generate([prompt.content for prompt in PROMPTS], SAMPLING)
        counters = engine.report().counters
    accepted = counters["num_accepted_tokens"]
    assert [one.token_ids for one in again] == [one.token_ids for one in plain] and accepted > 0
    assert not drill.load.unequal and not drill.load.failed and drill.load.num_requests > 0
    assert [fault.strikes for fault in drill.faults] == planned
    struck = Counter(identity for strikes in planned for identity, _ in strikes)
    ended = Counter(one.identity for one in engine.supervisor.incidents)
    assert struck <= ended and all(one.replaced for one in engine.supervisor.incidents)
    assert struck == ended or silence_s < 2.0, "only struck processes ended"
    with socket.create_server(("127.0.0.1", port)):  # the port is free
        pass
    deadline = time.monotonic() + 60
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before[1]
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = {child.pid for child in psutil.Process().children(recursive=True)} - before[1]
    assert not left and not shared_memory() - before[0]
    return drill


@pytest.fixture
def launch(tiny_launch, half_agreeing_drafter):
    drafter = ModelDrafterConfig(path=str(half_agreeing_drafter), num_draft_tokens=4, device="cpu")
    return lambda job, **sections: tiny_launch(job, **{"drafter": drafter} | sections)


def dealt(count: int, pairs: float = 0.0) -> Callable[[list[str]], list[tuple[Strike, ...]]]:
    return lambda identities: plan_faults(identities, SIGNALS, count, random.Random(0), pairs=pairs)


FEW = [(("coordinator", "SIGKILL"), ("draft-0", "SIGSTOP"))]
EVERY = [
    *FEW,
    (("coordinator", "SIGSTOP"), ("target-0", "SIGKILL")),
    (("draft-0", "SIGKILL"), ("target-0", "SIGSTOP")),
]


@pytest.mark.extended
@pytest.mark.ray
@pytest.mark.parametrize("plan", [FEW, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["few", "every"])
def test_a_handful_of_faults(launch, tmp_path, plan):
    """Two kinds of processes at once: no coordinator sees a freeze during which it dies.

    By default one that dies and a rank that freezes; a target that dies is replaced by the same path, and what it must
    do then is shown in `engine/test_restarts.py`.
    """
    drill = run_drill(launch, tmp_path, lambda identities: plan, "branches", tp=1, spacing_s=0.1, silence_s=1.0)
    causes = {(one.identity, one.cause == "hung and was ended") for one in drill.engine.supervisor.incidents}
    assert causes >= {(identity, name == "SIGSTOP") for strikes in plan for identity, name in strikes}, (
        "a process that ends is reported, one that freezes is noticed by its silence"
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("pipeline", "faults"), [("sync", 24), ("tree", 24), ("pingpong", 24)])
def test_many_faults(launch, tmp_path, pipeline, faults):
    run_drill(launch, tmp_path, dealt(faults, pairs=1 / 3), pipeline, tp=2, spacing_s=0.5)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_level_of_a_cascade_may_die(launch, tmp_path, half_agreeing_drafter):
    levels = three_levels(half_agreeing_drafter)
    drill = run_drill(launch, tmp_path, dealt(10), "branches", tp=1, spacing_s=0.5, drafter=levels)
    kinds = ("coordinator", "draft", "draft2", "draft3", "target")
    assert {(one.kind, one.signal) for one in drill.faults} == {(kind, name) for kind in kinds for name in SIGNALS}
    children = [fault for fault in drill.faults if fault.kind in ("draft2", "draft3")]
    assert all(fault.stalled_s < fault.replaced_s for fault in children), "decoding goes on without the level"


@pytest.mark.ray
@pytest.mark.slow
def test_a_level_that_dies_too_often_is_left_out(launch, tmp_path, half_agreeing_drafter):
    """The engine ends only with the process of a role that cannot be replaced."""
    pytest.importorskip("ray")
    cluster = ClusterConfig(ClusterName.local, dashboard=False, num_cpus=3, oversubscribe=True, max_restarts=1)
    levels = three_levels(half_agreeing_drafter)
    config = launch(DrillConfig(), cluster=cluster, drafter=replace(levels, levels=levels.levels[1:]))
    contents, sampling = [prompt.content for prompt in PROMPTS], replace(SAMPLING, max_tokens=100)
    with Engine(config, log_dir=tmp_path) as engine:
        plain = [one.token_ids for one in engine.generate(contents, sampling, drafter="none")]
        for _ in range(2):
            known, pid = len(engine.supervisor.incidents), engine.pids()["draft2-0"]
            os.kill(pid, signal.SIGKILL)
            assert [one.token_ids for one in engine.generate(contents, sampling)] == plain
            await_(lambda n=known: len(engine.supervisor.incidents) > n)
            await_(lambda n=known, old=pid: n or engine.pids()["draft2-0"] != old)
        engine.report(reset=True)
        assert [one.token_ids for one in engine.generate(contents, sampling)] == plain
        counters = engine.report().counters
    assert [incident.identity for incident in engine.supervisor.incidents] == ["draft2-0"] * 2
    assert counters["num_accepted_tokens"] > 0, "the level above drafts by itself"
    assert "0-model" not in counters["levels"], "and sends nothing to its child level"


@pytest.mark.ray
@pytest.mark.slow
def test_a_dead_driver_leaves_no_rank_and_no_coordinator(launch):
    pytest.importorskip("ray")
    script = f"""
        import time
        from actors.drafters.config import NoDrafterConfig
        from actors.options import PipelineConfig, TargetConfig, VerifyConfig
        from actors.protocol.sampling_params import SamplingParams
        from cluster.config.jobs import GenerateConfig
        from cluster.config.schema import ClusterConfig, ClusterName, LaunchConfig, PlacementConfig
        from cluster.engine import Engine

        engine = Engine(
            LaunchConfig(
                TargetConfig(path={launch(DrillConfig()).target.path!r}, device="cpu"),
                NoDrafterConfig(),
                VerifyConfig(),
                PipelineConfig(),
                PlacementConfig(),
                ClusterConfig(ClusterName.local, dashboard=False, num_cpus=1),
                GenerateConfig(),
            )
        )
        engine.submit("x", SamplingParams(max_tokens=450, ignore_eos=True))
        while len(engine.pids()) < 2:
            time.sleep(0.05)
        print(*engine.pids().values(), flush=True)
        time.sleep(600)
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    home = Path(tempfile.mkdtemp())  # paths of sockets are short
    environment["RAY_TMPDIR"] = str(home)
    driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        assert driver.stdout is not None
        actors = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        ray_processes = psutil.Process(driver.pid).children(recursive=True)
    finally:
        driver.kill()
        driver.wait()
    _, alive = psutil.wait_procs(actors + ray_processes, timeout=30)
    assert len(actors) == 2 and len(ray_processes) > 6 and not alive, "the guard ends Ray, and then itself"
    home.rmdir()  # what Ray had written is gone
