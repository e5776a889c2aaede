"""Runs a Slurm job: starts Ray on its nodes, launches once, and stops everything, however the launch ends.

`launch.sh` becomes this program inside a Slurm job: `python -m cluster.slurm.job [--dry-run] [overrides]`. SIGTERM
(scancel) and SIGUSR1 (the time limit is near) become SIGTERM to the launch, which writes its results so far. The
commands are decided in `cluster/slurm/plan.py`.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

from cluster.config.compose import load_config
from cluster.config.jobs import GenerateConfig
from cluster.config.schema import ClusterConfig, LaunchConfig
from cluster.slurm.plan import (
    EXPLICIT,
    SBATCH_OPTIONS,
    STOP,
    Allocation,
    JobPlan,
    NodeFacts,
    choose_bootstrap,
    make_plan,
    parse_devices,
    parse_nodes,
)
from parallel.whole_files import write_privately

LAUNCH_GRACE_S, RAY_GRACE_S = 20.0, 8.0
"""Together below Slurm's KillWait of 30 s, after which Slurm kills the job."""
POLL_S = 0.1


def main() -> None:
    """Entry point; always leaves through `sys.exit`."""
    dry_run = "--dry-run" in sys.argv[1:]
    overrides = [argument for argument in sys.argv[1:] if argument != "--dry-run"]
    try:
        allocation = Allocation.of(os.environ)
        if not dry_run:
            _check_host(allocation)
        run_dir = run_directory(allocation, overrides)
        plan = plan_for(allocation, overrides, run_dir)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    if dry_run:
        sys.stdout.write(plan.describe() + "\n")
        sys.exit(0)
    try:
        code = Job(plan, run_dir, allocation).run()
    except OSError as error:
        sys.stderr.write(f"error: {error}; choose another place with hydra.run.dir=DIR\n")
        sys.exit(1)
    sys.exit(code)


def _check_host(allocation: Allocation) -> None:
    """Raises ValueError outside the first node: `salloc` runs its command where it was called, as on a login node."""
    here = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    if here != allocation.head:
        raise ValueError(
            f"this is {here}, and the job has to be run from its first node, {allocation.head}; use sbatch, or "
            "`srun --pty --overlap --relative=0 --nodes=1 --ntasks=1 ./launch.sh cluster=slurm`"
        )


def run_directory(allocation: Allocation, overrides: Sequence[str]) -> Path:
    """The same for every start of a job, so that a requeued job finds its results."""
    for override in overrides:
        name, _, value = override.partition("=")
        if name == "hydra.run.dir" and "${" not in value:
            return Path(value.strip("\"'")).absolute()
    return Path.cwd() / "outputs" / "slurm" / str(allocation.job_id)


def plan_for(allocation: Allocation, overrides: Sequence[str], run_dir: Path) -> JobPlan:
    """The plan of this allocation. Raises ValueError, one line, for overrides that the launch would refuse."""
    config = _config(overrides)
    cluster = config.cluster if config is not None else ClusterConfig()
    known = parse_nodes(_output("scontrol", "-o", "show", "node", ",".join(allocation.nodes)))
    facts = {node: known.get(node, NodeFacts(node, 0)) for node in allocation.nodes}
    whole = all(facts[node].num_cpus == cpus for part in allocation.components for node, cpus in part.items())
    ray = find_spec("ray")  # does not import it
    assert ray is not None
    assert ray.origin is not None
    has_symmetric = (Path(ray.origin).parent / "scripts" / "symmetric_run.py").is_file()
    wanted = os.environ.get("SPECDEC_RAY", "auto")
    bootstrap = choose_bootstrap(wanted, allocation, has_symmetric=has_symmetric, whole_nodes=whole)
    addresses = {node: _address(node, facts, allocation) for node in allocation.nodes}
    if len(addresses) == 1 and bootstrap == EXPLICIT:  # `ray symmetric-run` takes the loopback for no node
        addresses = dict.fromkeys(addresses, "127.0.0.1")
    return make_plan(
        allocation,
        addresses,
        overrides,
        python=sys.executable,
        run_dir=str(run_dir),
        bootstrap=bootstrap,
        dashboard=cluster.dashboard,
        wait_s=cluster.wait_s,
        devices=parse_devices(_output("scontrol", "-d", "show", "job", allocation.name)),
        resumes=config is not None and isinstance(config.job, GenerateConfig),
        tmp=os.environ.get("SPECDEC_TMP", "/tmp"),
    )


def _config(overrides: Sequence[str]) -> LaunchConfig | None:
    """The configuration of the launch; None for several launches (`-m`) and Hydra's other modes."""
    if any(override.startswith("-") for override in overrides):
        return None
    return load_config(["cluster=slurm", "cluster.address=later:0", *overrides])


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        raise ValueError(
            f"{command[0]}: not found, as in a container without Slurm's commands; start the job outside, or add "
            "cluster=local to use this node only"
        ) from None


def _address(node: str, facts: dict[str, NodeFacts], allocation: Allocation) -> str:
    """An address of the node that others can reach; many systems resolve their own name to the loopback."""
    found = _resolve(facts[node].address)
    others = [facts[other].address for other in allocation.nodes if other != node]
    if ip_address(found).is_loopback and node == allocation.head and others:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
            towards.connect((_resolve(others[0]), 9))  # sends nothing, but chooses the local address
            return towards.getsockname()[0]
    return found


def _resolve(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ValueError(f"node {name}: its address cannot be looked up ({error}); see `scontrol show node`") from error


class Job:
    """One run of a plan."""

    def __init__(self, plan: JobPlan, run_dir: Path, allocation: Allocation) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._allocation = allocation
        self._environment = {name: value for name, value in os.environ.items() if name not in SBATCH_OPTIONS}
        self._environment |= plan.environment
        self._rays: dict[str, subprocess.Popen] = {}
        self._stop_signal: signal.Signals | None = None

    def run(self) -> int:
        """The exit code of the launch."""
        self._on_signals(self._stop)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        token_file = write_privately(Path(self._plan.environment["RAY_AUTH_TOKEN_PATH"]), secrets.token_hex())
        try:
            self._start_rays()
            code = self._launch() if self._stop_signal is None else 128 + self._stop_signal
        finally:
            self._on_signals(signal.SIG_IGN)
            self._stop_rays()
            token_file.unlink(missing_ok=True)
        if self._stop_signal == signal.SIGUSR1 and os.environ.get("SPECDEC_REQUEUE") == "1":
            sys.stderr.write("the time limit is near: requeued, to go on from what is finished\n")
            _output("scontrol", "requeue", self._allocation.name)
        return code

    @staticmethod
    def _on_signals(handler: Callable[[int, object], None] | signal.Handlers) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, handler)

    def _stop(self, number: int, _frame: object) -> None:
        """The first signal counts. Written at once, because the launch may have got the signal, too."""
        if self._stop_signal is None:
            self._stop_signal = signal.Signals(number)
            os.write(sys.stderr.fileno(), f"{self._stop_signal.name}: stopping\n".encode())

    def _start_rays(self) -> None:
        """All nodes at once: the others wait for the head."""
        for name, command in self._plan.rays.items():
            with (self._run_dir / f"ray-{name}.log").open("ab") as log:
                self._rays[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )

    def _launch(self) -> int:
        """Wait for the launch; after a signal end it, with time to write its results so far."""
        launch = subprocess.Popen(self._plan.launch, env=self._environment)
        running = dict(self._rays)
        stopped_at: float | None = None
        while launch.poll() is None:
            time.sleep(POLL_S)
            if self._stop_signal is not None and stopped_at is None:
                stopped_at = time.monotonic()
                launch.terminate()
            elif stopped_at is not None and time.monotonic() - stopped_at > LAUNCH_GRACE_S:
                launch.kill()
            for name in [name for name, ray in running.items() if ray.poll() is not None]:
                del running[name]
                if stopped_at is None:
                    sys.stderr.write(f"Ray has ended; see {self._run_dir}/ray-{name}.log\n")
        return launch.returncode if launch.returncode >= 0 else 128 - launch.returncode

    def _stop_rays(self) -> None:
        """Signal every node to stop Ray and clear up; kill what is left after `RAY_GRACE_S`."""
        for ray in self._rays.values():
            ray.send_signal(STOP)  # unless it has ended
        deadline = time.monotonic() + RAY_GRACE_S
        for ray in self._rays.values():
            try:
                ray.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                ray.terminate()  # `srun` then kills its step; a shell is left to Slurm


if __name__ == "__main__":
    main()
