"""The plan of a Slurm job, from its environment: names, numbers, ports, commands."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from cluster.slurm.job import plan_for
from cluster.slurm.plan import (
    EXPLICIT,
    STOP,
    SYMMETRIC,
    Allocation,
    choose_bootstrap,
    expand_counts,
    expand_hostlist,
    make_plan,
    parse_devices,
    parse_nodes,
    ports_of,
)

ROOT = Path(__file__).parents[3]
TWO = Allocation(4711, ({"n1": 8, "n2": 4},))
PARTS = Allocation(4711, ({"big1": 64, "big2": 64}, {"cheap": 16}))
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


@pytest.mark.parametrize("folder", ["/shared/run", "/a b/run (2)", "/x=1,y/[z]", '/with "quotes"/é'])
def test_hydra_reads_the_folder_of_the_run_as_it_is(folder):
    words = [word for word in plan_of(run_dir=folder).launch if word.startswith("hydra.")]
    parsed = OverridesParser.create().parse_overrides(words)
    assert [override.value() for override in parsed] == [folder] * 2


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
    text = "NodeName=n1 Arch=x86_64 CPUAlloc=0 CPUTot=8 NodeAddr=10.0.0.1 State=IDLE\nNodeName=n2 CPUTot=4 State=IDLE\n"
    known = parse_nodes(text)
    assert (known["n1"].address, known["n1"].num_cpus) == ("10.0.0.1", 8)
    assert (known["n2"].address, known["n2"].num_cpus) == ("n2", 4)


def test_a_step_asks_for_all_devices_the_job_has_on_its_node():
    text = "JobId=4711\n NodeList=n[1-3]\n Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)\n Nodes=n[2-3] CPU_IDs=0-1 Mem=0 "
    devices = parse_devices(f"{text}GRES=gpu:a100:3(IDX:0-1,3),nic:1(CNT:1)\n   MinCPUsNode=1")
    assert devices == {"n1": "gpu:1"} | dict.fromkeys(["n2", "n3"], "gpu:a100:3,nic:1")
    assert parse_devices("Nodes=n1 CPU_IDs=0 Mem=0 GRES=\n   MinCPUsNode=1") == {}
    assert "--gres=gpu:a100:3,nic:1" in plan_of(devices=devices).rays["n2"]


def test_jobs_that_follow_each_other_share_no_port():
    taken = [port for job in range(4700, 4800) for port in ports_of(job)]
    assert len(set(taken)) == len(taken) and min(taken) >= 20000 and max(*ports_of(1595), *taken) < 32768


def test_ray_is_started_on_every_node_and_the_launch_once_on_the_head():
    plan = plan_of(TWO, "target.tp=4", resumes=True)
    head, second = plan.rays["n1"], plan.rays["n2"]
    assert head[:2] == ["bash", "-c"] and second[0] == "srun" and "--nodelist=n2" in second and "--overlap" in second
    port = ports_of(4711)[0]
    assert f"/env/bin/ray start --head --port={port} --node-ip-address=10.0.0.1 --num-cpus=8" in head[-1]
    assert f"/env/bin/ray start --address=10.0.0.1:{port} --node-ip-address=10.0.0.2 --num-cpus=4" in second[-1]
    for command in (head, second):
        assert "--temp-dir=/tmp/specdec-4711/ray " in command[-1]
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


def test_symmetric_run_holds_ray_in_one_step_and_the_launch_is_the_same():
    plan = plan_of(bootstrap=SYMMETRIC, dashboard=False, wait_s=90.0)
    (step,) = plan.rays.values()
    assert step[0] == "srun" and "--ntasks=2" in step and plan.launch == plan_of().launch
    assert "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=90 /env/bin/ray symmetric-run --address 10.0.0.1:" in step[-1]
    assert "--min-nodes 2 " in step[-1] and step[-1].endswith("/env/bin/ray stop; rm -rf /tmp/specdec-4711")
    assert "RAY_gcs_rpc_server_reconnect_timeout_s=5" in step[-1], "for Ray's own, not for the launch"
    assert not any("gcs_rpc" in name for name in plan.environment)
    assert int(plan.environment["RAY_NUM_REDIS_GET_RETRIES"]) > 20, "Ray's 40 s are too few on a busy node"


FAKE_RAY = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[0]).parent
stop = lambda number, frame: sys.exit((folder / "stopped").touch())
if sys.argv[1] == "stop":
    (folder / "stopped").touch()
else:
    signal.signal(signal.SIGTERM, stop)
    (folder / "job" / "specdec-4711" / "ray").mkdir()
    (folder / "arguments").write_text(" ".join(sys.argv[1:]))
    time.sleep(300)
"""


@pytest.mark.extended
@pytest.mark.parametrize("bootstrap", [EXPLICIT, SYMMETRIC])
@pytest.mark.parametrize("node", [0, 1])
def test_ray_ends_and_its_folder_goes_where_only_the_shell_is_signalled(tmp_path, bootstrap, node):
    """As with `proctrack/cgroup`, signals reach only what Slurm itself started. SIGTERM ends the launch, not Ray."""
    ray, folder, arguments = tmp_path / "ray", tmp_path / "job" / "specdec-4711", tmp_path / "arguments"
    ray.write_text(f"#!{sys.executable}{FAKE_RAY}")
    ray.chmod(0o755)
    (folder / "left by a node failure").mkdir(parents=True)
    plan = plan_of(bootstrap=bootstrap, python=f"{tmp_path}/python", tmp=f"{tmp_path}/job")
    command = list(plan.rays.values())[-1 if bootstrap == SYMMETRIC else node]
    shell = subprocess.Popen(command[command.index("bash") :], env={**os.environ, "SLURM_PROCID": str(node)})
    while not arguments.exists() or not arguments.read_text():
        assert shell.poll() is None
        time.sleep(0.01)
    assert folder.stat().st_mode & 0o777 == 0o700 and [path.name for path in folder.iterdir()] == ["ray"]
    assert ("--include-dashboard=true" in arguments.read_text()) == (node == 0), "the others refuse that"
    shell.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        shell.wait(0.2)
    shell.send_signal(STOP)
    assert shell.wait(60) == 0
    assert (tmp_path / "stopped").exists() and not folder.exists()


@pytest.mark.parametrize("bootstrap", [EXPLICIT, SYMMETRIC])
def test_ray_is_not_started_in_the_folder_of_another_user(tmp_path, bootstrap):
    """Its name is known before; that user could replace Ray's sockets. Here it cannot be made at all."""
    ray = tmp_path / "ray"
    ray.write_text(f"#!{sys.executable}{FAKE_RAY}")
    ray.chmod(0o755)
    plan = plan_of(bootstrap=bootstrap, python=f"{tmp_path}/python", tmp="/proc")
    command = next(iter(plan.rays.values()))
    done = subprocess.run(command[command.index("bash") :], capture_output=True, check=False)
    assert done.returncode == 1 and not (tmp_path / "arguments").exists()


def test_a_job_on_one_node_keeps_ray_on_the_loopback():
    plan = make_plan(Allocation(9, ({"n1": 8},)), {"n1": "127.0.0.1"}, [], python="/env/bin/python", run_dir="/run")
    assert "--node-ip-address=127.0.0.1" in plan.rays["n1"][-1]
    assert any(word.startswith("cluster.address=127.0.0.1:") for word in plan.launch)
    assert plan.environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "else Ray takes another address of the node"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in plan_of().environment


def test_options_of_the_command_line_stand_before_all_overrides():
    """Among the overrides they would part these in two, of which Hydra takes one."""
    launch = plan_of(TWO, "-m", "sampling.seed=1,2", "~x", "--cfg", "job").launch
    assert launch[4:8] == ["-m", "--cfg", "job", "cluster=slurm"] and launch[-2:] == ["sampling.seed=1,2", "~x"]


@pytest.mark.parametrize(
    ("wanted", "allocation", "has_symmetric", "whole_nodes", "chosen"),
    [
        ("auto", TWO, True, True, SYMMETRIC),
        ("auto", TWO, False, True, EXPLICIT),
        ("auto", TWO, True, False, EXPLICIT),
        ("auto", PARTS, True, True, EXPLICIT),
        ("auto", Allocation(1, ({"n1": 8},)), True, True, EXPLICIT),
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


@pytest.mark.extended
def test_a_plan_follows_the_configuration_of_its_launch(monkeypatch, tmp_path):
    """This is decided without an answer of scontrol: whether a requeued job resumes, and what is started of Ray."""
    monkeypatch.setattr("cluster.slurm.job._output", lambda *command: "")
    one = Allocation(7, ({"localhost": 2},))

    def planned(*overrides):
        plan = plan_for(one, ["drafter=ngram", *overrides], tmp_path)
        return "job.resume=true" in plan.launch, "--include-dashboard=true" in str(plan)

    assert planned() == (True, True) and planned("cluster.dashboard=false") == (True, False)
    assert planned("job=certify") == (False, True) and planned("-m") == (False, True), "not known of several launches"


def run_script(*arguments, **environment):
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        [ROOT / "launch.sh", *arguments],
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
        (["drafter=ngram", "sampling.stop=[a b]"], {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}),
    ],
    ids=["on this machine", "as chosen", "inside a step"],
)
def test_the_script_stays_on_one_machine_unless_it_is_a_job(overrides, environment):
    done = run_script(*overrides, "--dry-run", **environment)
    assert shlex.split(done.stdout) == [f"{sys.prefix}/bin/python", "-P", "-m", "cluster.launch", *overrides]


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost"}
INTERACTIVE = {**JOB, "SLURM_STEP_ID": "4294967290"}


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs scontrol: apt-get install slurm-client")
def test_the_shell_of_an_allocation_runs_the_job():
    assert "ray start --head" in run_script("--dry-run", **INTERACTIVE).stdout


def test_a_job_is_run_from_its_first_node():
    """`salloc` runs a command where it was called; its interactive step is on that node."""
    done = run_script("drafter=ngram", **INTERACTIVE, SLURMD_NODENAME="login")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: this is login, and the job has to be run from its first node, localhost; use")


@pytest.mark.extended
def test_a_job_without_the_commands_of_slurm_is_one_line(tmp_path):
    """As in a container of a job, which has the job's variables."""
    for program in ("bash", "dirname", "realpath"):
        (tmp_path / program).symlink_to(shutil.which(program))
    done = run_script("--dry-run", **JOB, PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: scontrol: not found") and "cluster=local" in done.stderr


@pytest.mark.extended
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("target.tp=0", "target.tp=0: must be at least 1"),
        pytest.param("pipeline=x", "pipeline=x: no such", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_in_a_job_is_one_line_before_anything_is_started(override, line):
    done = run_script(override, "--dry-run", **JOB)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: {line}"), done.stderr
    assert done.stderr.count("\n") == 1
