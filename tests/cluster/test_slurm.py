"""The plan of a Slurm job, from its environment: names, numbers, ports, commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

from cluster.slurm import (
    EXPLICIT,
    SYMMETRIC,
    Allocation,
    Component,
    Ports,
    choose_bootstrap,
    expand_counts,
    expand_hostlist,
    make_plan,
    parse_nodes,
)

ROOT = Path(__file__).parents[2]
TWO = Allocation(4711, (Component(("n1", "n2"), (8, 4)),))
PARTS = Allocation(4711, (Component(("big1", "big2"), (64, 64)), Component(("cheap",), (16,))))
ADDRESSES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "big1": "10.0.1.1", "big2": "10.0.1.2", "cheap": "10.0.2.1"}


def plan_of(allocation=TWO, *overrides, **options):
    options = {"python": "/env/bin/python", "run_dir": "/shared/run"} | options
    return make_plan(allocation, ADDRESSES, overrides, **options)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r[1-2]c[1-2]", ["r1c1", "r1c2", "r2c1", "r2c2"]),
        ("a-1,b[2]-x", ["a-1", "b2-x"]),
    ],
)
def test_hostlists(text, hosts):
    assert expand_hostlist(text) == hosts


def test_counts():
    assert expand_counts("4(x2),1") == [4, 4, 1] and expand_counts("16") == [16]


def test_an_allocation_is_read_from_the_environment():
    environment = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "8,4"}
    assert Allocation.of(environment) == Allocation(9, TWO.components) and Allocation.of(environment).head == "n1"
    parts = {
        "SLURM_JOB_ID": "4711",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "big[1-2]",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "64(x2)",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "cheap",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "16",
    }
    assert Allocation.of(parts) == PARTS
    task = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "4", "SLURM_JOB_NODELIST": "n1"}
    assert Allocation.of(task).name == "12_4", "12 would be every task of the array"
    assert Allocation.of(environment).name == "9"
    with pytest.raises(ValueError, match=r"^SLURM_JOB_ID: not set"):
        Allocation.of({})


def test_what_scontrol_says_of_nodes():
    said = "NodeName=n1 Arch=x86_64 CPUAlloc=0 CPUTot=8 NodeAddr=10.0.0.1 State=IDLE\nNodeName=n2 CPUTot=4 State=IDLE\n"
    known = parse_nodes(said)
    assert (known["n1"].address, known["n1"].num_cpus) == ("10.0.0.1", 8)
    assert (known["n2"].address, known["n2"].num_cpus) == ("n2", 4)


def test_jobs_that_follow_each_other_share_no_port():
    taken = [port for job in range(4700, 4800) for port in astuple(Ports.of(job))]
    assert len(set(taken)) == len(taken) and 20000 <= min(taken) and max(Ports.of(1595).client, *taken) < 32768


def test_ray_is_started_on_every_node_and_the_launch_once_on_the_head():
    plan = plan_of(TWO, "target.tp=4", resumes=True)
    head, second = plan.rays["n1"], plan.rays["n2"]
    assert head[:2] == ["bash", "-c"] and second[0] == "srun" and "--nodelist=n2" in second and "--overlap" in second
    port = Ports.of(4711).head
    assert f"/env/bin/ray start --head --port={port} --node-ip-address=10.0.0.1 --num-cpus=8" in head[-1]
    assert f"/env/bin/ray start --address=10.0.0.1:{port} --node-ip-address=10.0.0.2 --num-cpus=4" in second[-1]
    for command in (head, second):
        assert command[-1].startswith("trap : TERM; ") and command[-1].endswith("; rm -rf /tmp/specdec-4711")
        assert "--temp-dir=/tmp/specdec-4711" in command[-1]
    launch = plan.launch
    assert launch[:5] == ["/env/bin/python", "-P", "-m", "cluster.launch", "cluster=slurm"]
    assert {f"cluster.address=10.0.0.1:{port}", "cluster.nodes=2", "hydra.run.dir=/shared/run"} <= set(launch)
    assert launch[-2:] == ["job.resume=true", "target.tp=4"], "the user has the last word"


def test_a_job_of_two_parts_keeps_the_drafter_on_the_second():
    plan = plan_of(PARTS)
    assert "placement.nodes={target:[10.0.1.1,10.0.1.2],draft:[10.0.2.1]}" in plan.launch
    assert "--het-group=0" in plan.rays["big2"] and "--het-group=1" in plan.rays["cheap"]
    own = plan_of(PARTS, "placement.nodes={draft:[big2]}")
    assert [word for word in own.launch if word.startswith("placement.nodes")] == ["placement.nodes={draft:[big2]}"]


def test_symmetric_run_starts_ray_and_the_launch_in_one_step():
    plan = plan_of(bootstrap=SYMMETRIC)
    assert plan.rays == {} and plan.launch[0] == "srun" and plan.environment["RAY_TMPDIR"] == "/tmp/specdec-4711"
    assert "--ntasks=2" in plan.launch and plan.launch_pid == "/tmp/specdec-4711/launch.pid"
    script = plan.launch[-1]
    assert script.startswith("trap : TERM; ") and script.endswith("; rm -rf /tmp/specdec-4711; exit $code")
    start, launch = script.split(" -- ")
    assert start.endswith("--min-nodes 2 --disable-usage-stats")
    noted = shlex.split(launch.partition("; code=$?")[0])
    assert noted[:2] == ["bash", "-c"] and shlex.split(noted[2].partition("; exec ")[2]) == plan_of().launch
    assert not plan_of().launch_pid


def test_options_of_the_command_line_stand_before_all_overrides():
    """In between they would part the overrides in two, of which Hydra takes one."""
    launch = plan_of(TWO, "-m", "sampling.seed=1,2", "~x", "--cfg", "job").launch
    assert launch[4:8] == ["-m", "--cfg", "job", "cluster=slurm"] and launch[-2:] == ["sampling.seed=1,2", "~x"]


@pytest.mark.parametrize(
    ("wanted", "allocation", "has_symmetric", "whole_nodes", "chosen"),
    [
        ("auto", TWO, True, True, SYMMETRIC),
        ("auto", TWO, False, True, EXPLICIT),
        ("auto", TWO, True, False, EXPLICIT),
        ("auto", PARTS, True, True, EXPLICIT),
        ("auto", Allocation(1, (Component(("n1",), (8,)),)), True, True, EXPLICIT),
        (EXPLICIT, TWO, True, True, EXPLICIT),
        (SYMMETRIC, TWO, True, False, SYMMETRIC),
    ],
)
def test_symmetric_run_only_where_it_can_end_no_other_ray(wanted, allocation, has_symmetric, whole_nodes, chosen):
    assert choose_bootstrap(wanted, allocation, has_symmetric=has_symmetric, whole_nodes=whole_nodes) == chosen


@pytest.mark.parametrize(("wanted", "line"), [("both", "unknown; choose auto, sym"), (SYMMETRIC, "this Ray has no")])
def test_a_bootstrap_that_cannot_be_is_refused(wanted, line):
    with pytest.raises(ValueError, match=rf"^SPECDEC_RAY={wanted}: {line}"):
        choose_bootstrap(wanted, TWO, has_symmetric=False, whole_nodes=True)


def test_a_dry_run_prints_what_a_shell_would_understand():
    plan = plan_of(TWO, "sampling.stop=[a b]")
    lines = plan.describe().splitlines()
    assert lines[0] == "export RAY_AUTH_MODE=token" and [shlex.split(line) for line in lines]
    assert shlex.split(lines[-1]) == plan.launch and lines[-2] == shlex.join(plan.rays["n2"]) + " &"


def dry_run(*overrides, **environment):
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        [ROOT / "launch.sh", "--dry-run", *overrides],
        env={**outside, "SPECDEC_VENV": sys.prefix, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("overrides", "environment"),
    [
        (["drafter=ngram"], {}),
        (["cluster=local", "drafter=ngram"], {"SLURM_JOB_ID": "7"}),
        (["drafter=ngram"], {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}),
    ],
    ids=["on this machine", "as told", "inside a step"],
)
def test_the_script_stays_on_one_machine_unless_it_is_a_job(overrides, environment):
    done = dry_run(*overrides, **environment)
    assert done.stdout == f"{sys.prefix}/bin/python -P -m cluster.launch {' '.join(overrides)}\n", done.stderr


def test_a_mistake_in_a_job_is_one_line_before_anything_is_started():
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost"}
    for override, line in (("target.tp=0", "target.tp=0: must be at least 1"), ("pipeline=x", "pipeline=x: no such")):
        done = dry_run(override, **job)
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: {line}"), done.stderr
        assert done.stderr.count("\n") == 1
