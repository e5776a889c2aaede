"""The program of a Slurm job with shells in place of Ray and the launch: what it starts, signals, waits for and leaves.

That a real Slurm does the same is shown by `test_job.py`; the commands are those of `test_plan.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.slurm import job as module
from cluster.slurm.job import Job, run_directory
from cluster.slurm.plan import Allocation, JobPlan, NodeFacts

ALLOCATION = Allocation(7, ({"n1": 2, "n2": 2},), "5_3")


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch):
    """Signals and variables of this process are as before at the end."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.delenv("SPECDEC_REQUEUE", raising=False)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def shell(script: str) -> list[str]:
    return ["bash", "-c", script]


class Run:
    """A job in a folder: each shell writes what it notices to a file of its name there."""

    def __init__(self, folder: Path, launch: str, *, ray: str | None = None) -> None:
        self.folder, self.run_dir, self.asked = folder, folder / "deep" / "run", list[tuple[str, ...]]()
        traps = (
            f"trap 'echo stopped >> {folder}/NAME; exit' USR2; ps -o sid= -p $$ > {folder}/NAME.session; "
            f"echo $SETTING-$SLURM_GPUS- >> {folder}/NAME"
        )
        rays = {name: shell((ray or f"{traps}; while :; do sleep 0.02; done").replace("NAME", name)) for name in "ab"}
        environment = {"SETTING": "here", "RAY_AUTH_TOKEN_PATH": str(self.run_dir / "token")}
        self.plan = JobPlan(environment, rays, shell(f"cd {folder}; {launch}"))

    def start(self) -> int:
        return Job(self.plan, self.run_dir, ALLOCATION).run()

    def said(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().split() if path.exists() else []


BOTH_RUN = "until [ -s a ] && [ -s b ]; do sleep 0.01; done"


def test_ray_runs_while_the_launch_does_and_the_token_with_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SLURM_GPUS", "4")
    run = Run(tmp_path, f"{BOTH_RUN}; echo $SETTING-$SLURM_GPUS- > launch; stat -c %a deep/run/token >> launch; exit 3")
    assert run.start() == 3
    assert run.said("a") == run.said("b") == ["here--", "stopped"] and run.said("launch") == ["here--", "600"]
    assert sorted(path.name for path in run.run_dir.iterdir()) == ["ray-a.log", "ray-b.log"]
    sessions = {run.said(f"{name}.session")[0] for name in "ab"}
    assert len(sessions) == 2 and str(os.getsid(0)) not in sessions, "Ctrl-C reaches the launch alone"
    assert capfd.readouterr().err == ""
    assert run.start() == 3, "a requeued job finds its folder"


def test_a_launch_that_a_signal_ended_has_the_code_of_shells(tmp_path):
    assert Run(tmp_path, f"{BOTH_RUN}; kill -SEGV $$").start() == 128 + signal.SIGSEGV


def test_ray_that_ends_before_the_launch_is_named_and_the_launch_decides(tmp_path, capfd):
    run = Run(
        tmp_path, "while kill -0 $(cat a) || kill -0 $(cat b); do sleep 0.01; done; sleep 0.2; exit 0", ray="NAME"
    )
    run.plan.rays.update({name: shell(f"echo $$ > {tmp_path}/{name}; echo why") for name in "ab"})
    assert run.start() == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Ray")]
    assert sorted(lines) == [f"Ray has ended; see {run.run_dir}/ray-{name}.log" for name in "ab"]
    assert (run.run_dir / "ray-a.log").read_text() == "why\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("requeues", [False, True])
def test_a_signal_ends_the_launch_first_and_a_time_limit_may_requeue(tmp_path, monkeypatch, capfd, number, requeues):
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(module, "_output", lambda *command: asked.append(command) or "")
    if requeues:
        monkeypatch.setenv("SPECDEC_REQUEUE", "1")
    run = Run(
        tmp_path,
        f"trap 'cp a launch; exit 130' TERM; {BOTH_RUN}; kill -{number.name} $PPID; sleep 0.05; kill -TERM $PPID;"
        " while :; do sleep 0.01; done",
    )
    assert run.start() == 130
    assert run.said("launch") == ["here--"] and run.said("a") == ["here--", "stopped"], "Ray ends after the launch"
    error = capfd.readouterr().err
    assert error.count("stopping") == 1 and error.startswith(f"{number.name}: stopping\n"), "the first one counts"
    is_requeued = requeues and number == signal.SIGUSR1
    assert asked == [("scontrol", "requeue", "5_3")] * is_requeued and ("requeued" in error) is is_requeued
    assert "Ray has ended" not in error
    for other in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        assert signal.getsignal(other) == signal.SIG_IGN, "further signals must not disturb the end"


def test_a_launch_that_does_not_end_is_killed_after_its_grace(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LAUNCH_GRACE_S", 0.3)
    run = Run(tmp_path, f"trap : TERM; {BOTH_RUN}; kill -TERM $PPID; while :; do date +%s%N > ticks; done")
    began = time.monotonic()
    assert run.start() == 128 + signal.SIGKILL
    assert time.monotonic() - began > 0.3


def test_ray_that_does_not_stop_is_terminated_after_its_grace(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RAY_GRACE_S", 0.3)
    ray = f"trap : USR2; trap 'echo terminated >> {tmp_path}/NAME; exit' TERM; echo x >> {tmp_path}/NAME; "
    run = Run(tmp_path, BOTH_RUN, ray=ray + "while :; do sleep 0.02; done")
    began = time.monotonic()
    assert run.start() == 0 and time.monotonic() - began > 0.3
    while run.said("a") != ["x", "terminated"] or run.said("b") != ["x", "terminated"]:
        time.sleep(0.01)


def test_the_graces_fit_the_time_that_slurm_gives():
    assert module.RAY_GRACE_S > 0 and module.LAUNCH_GRACE_S + module.RAY_GRACE_S < 30


def test_a_signal_while_ray_starts_leaves_the_launch_out(tmp_path, monkeypatch):
    run = Run(tmp_path, "touch launched")
    monkeypatch.setattr(Job, "_start_rays", lambda job: os.kill(os.getpid(), signal.SIGTERM))
    assert run.start() == 128 + signal.SIGTERM and not (tmp_path / "launched").exists()
    assert not (run.run_dir / "token").exists()


# --- before the job -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["a=1"], {}, (2, "", "error: SLURM_JOB_ID: not set, so this is no Slurm job; submit it with")),
        (["a=1"], {"SLURMD_NODENAME": "n2"}, (2, "", "error: this is n2, and the job has to be run from its first")),
        (["a=1", "bad=2"], {"SLURMD_NODENAME": "n1"}, (2, "", "error: bad=2: is bad")),
        (["a=1"], {"SLURMD_NODENAME": "n1"}, (5, "ran ['a=1']", "")),
        (["a=1", "--dry-run"], {"SLURMD_NODENAME": "n2"}, (0, "described ['a=1']\n", "")),
    ],
    ids=["outside", "another node", "a mistake", "runs", "dry run"],
)
def test_what_is_done_with_a_command_line(monkeypatch, capsys, arguments, environment, expected):
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    if environment:
        environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", **environment}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def planned(allocation: Allocation, overrides: list[str], run_dir: Path) -> Any:
        assert allocation.nodes == ["n1", "n2"] and run_dir == Path.cwd() / "outputs" / "slurm" / "7"
        if "bad=2" in overrides:
            raise ValueError("bad=2: is bad")
        return SimpleNamespace(describe=lambda: f"described {overrides}", overrides=overrides)

    def made(plan: Any, run_dir: Path, allocation: Allocation) -> Any:
        assert (run_dir.name, allocation.job_id) == ("7", 7)
        return SimpleNamespace(run=lambda: sys.stdout.write(f"ran {plan.overrides}") and 5)

    monkeypatch.setattr(module, "plan_for", planned)
    monkeypatch.setattr(module, "Job", made)
    monkeypatch.setattr(sys, "argv", ["job", *arguments])
    with pytest.raises(SystemExit) as left:
        module.main()
    out, error = capsys.readouterr()
    assert (left.value.code, out) == expected[:2] and error.startswith(expected[2]) and bool(error) is bool(expected[2])


def test_the_host_is_known_without_slurms_word_for_it(monkeypatch):
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "n1.cluster.org")
    module._check_host(ALLOCATION)
    monkeypatch.setattr(socket, "gethostname", lambda: "login.cluster.org")
    with pytest.raises(ValueError, match="^this is login, "):
        module._check_host(ALLOCATION)


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        ([], "outputs/slurm/7"),
        (["job.limit=1", "hydra.run.dir=mine"], "mine"),
        (["hydra.run.dir=/abs/mine"], "/abs/mine"),
        (['hydra.run.dir="my (own), 1"'], "my (own), 1"),
        (["hydra.run.dir=x/${now:%H}"], "outputs/slurm/7"),
        (["hydra.run.dirs=x"], "outputs/slurm/7"),
    ],
)
def test_a_job_that_starts_again_finds_its_folder(monkeypatch, tmp_path, overrides, folder):
    monkeypatch.chdir(tmp_path)
    assert run_directory(ALLOCATION, overrides) == tmp_path / folder


@pytest.mark.parametrize(
    ("node", "addresses", "expected"),
    [
        ("n1", {"n1": "10.0.0.1", "n2": "10.0.0.2"}, "10.0.0.1"),
        ("n1", {"n1": "127.0.1.1", "n2": "10.0.0.2"}, "towards 10.0.0.2"),
        ("n2", {"n1": "127.0.1.1", "n2": "127.0.0.1"}, "127.0.0.1"),
        ("n1", {"n1": "127.0.1.1"}, "127.0.1.1"),
    ],
    ids=["as it resolves", "the head on the loopback", "another node", "alone"],
)
def test_the_head_has_an_address_that_others_can_reach(monkeypatch, node, addresses, expected):
    class Towards:
        def __init__(self, *kind: int) -> None:
            assert kind == (socket.AF_INET, socket.SOCK_DGRAM)

        def __enter__(self) -> Towards:
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, address: tuple[str, int]) -> None:
            self.peer = address[0]

        def getsockname(self) -> tuple[str, int]:
            return f"towards {self.peer}", 1

    monkeypatch.setattr(socket, "socket", Towards)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: addresses[name.removeprefix("host-")])
    facts = {name: NodeFacts(f"host-{name}", 2) for name in addresses}
    allocation = Allocation(7, (dict.fromkeys(addresses, 2),))
    assert module._address(node, facts, allocation) == expected


def test_a_node_whose_address_is_unknown_is_named(monkeypatch):
    def unknown(name: str) -> str:
        raise OSError("no such host")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with pytest.raises(ValueError, match=r"^node x: its address cannot be looked up \(no such host\); see `scontrol"):
        module._resolve("x")


@pytest.mark.extended
def test_a_plan_is_made_of_what_slurm_and_the_configuration_say(monkeypatch, tmp_path):
    said = {
        ("scontrol", "-o", "show", "node", "n1,n2"): "NodeName=n1 NodeAddr=a1 CPUTot=4\nNodeName=n2 CPUTot=2\n",
        ("scontrol", "-d", "show", "job", "5_3"): "Nodes=n2 CPU_IDs=0 Mem=0 GRES=gpu:1\n",
    }
    chosen: list[Any] = []
    made: dict[str, Any] = {}
    monkeypatch.setattr(module, "_output", lambda *command: said[command])
    monkeypatch.setattr(module, "_address", lambda node, facts, allocation: facts[node].address + "!")
    monkeypatch.setattr(module, "choose_bootstrap", lambda *asked, **facts: chosen.append((asked, facts)) or "explicit")
    monkeypatch.setattr(module, "make_plan", lambda *asked, **facts: made.update(facts, asked=asked))
    monkeypatch.setenv("SPECDEC_RAY", "explicit")
    monkeypatch.setenv("SPECDEC_TMP", "/scratch")
    overrides = ["drafter=ngram", "cluster.wait_s=9"]
    for cpus, whole in (({"n1": 4, "n2": 2}, True), ({"n1": 4, "n2": 1}, False)):
        allocation = Allocation(7, (cpus,), "5_3")
        module.plan_for(allocation, overrides, tmp_path)
        assert chosen.pop() == (("explicit", allocation), {"has_symmetric": True, "whole_nodes": whole})
        assert made == {
            "asked": (allocation, {"n1": "a1!", "n2": "n2!"}, overrides),
            "python": sys.executable,
            "run_dir": str(tmp_path),
            "bootstrap": "explicit",
            "dashboard": True,
            "wait_s": 9.0,
            "devices": {"n2": "gpu:1"},
            "resumes": True,
            "tmp": "/scratch",
        }
    said["scontrol", "-o", "show", "node", "n1"] = ""
    for bootstrap, address in (("explicit", "127.0.0.1"), ("symmetric", "n1!")):
        monkeypatch.setattr(module, "choose_bootstrap", lambda *_, answer=bootstrap, **__: answer)
        module.plan_for(Allocation(7, ({"n1": 2},), "5_3"), overrides, tmp_path)
        assert made["asked"][1] == {"n1": address}, "`ray symmetric-run` takes the loopback for no node"


def test_a_folder_that_cannot_be_made_is_one_line(monkeypatch, tmp_path, capsys):
    (tmp_path / "outputs").write_text("a file")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.sys, "argv", ["job"])
    monkeypatch.setattr(module.Allocation, "of", lambda _environment: ALLOCATION)
    monkeypatch.setattr(module, "_check_host", lambda _allocation: None)
    monkeypatch.setattr(module, "plan_for", lambda *_: Run(tmp_path, "exit").plan)
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: [Errno 20]") and line.endswith("; choose another place with hydra.run.dir=DIR")
