"""What a Slurm job runs, as a plan of commands made from the job's environment alone.

Pure functions: `cluster/slurm/job.py` runs the plan. Ports and folders follow from the job's number, so that two jobs
can share a node. The user's overrides come last on the command line of the launch, so they take precedence.
"""

from __future__ import annotations

import itertools
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import PurePath

SYMMETRIC, EXPLICIT = "symmetric", "explicit"
SBATCH_OPTIONS = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET")
SBATCH_OPTIONS += ("SLURM_NTASKS_PER_GPU", "SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_GPU")
"""The options of `sbatch`, which `srun` would otherwise request again for a step on one node."""
STOP = signal.SIGUSR2
"""Stops Ray on a node: one of the signals that `srun` forwards to its step."""
_FIRST_PORT, _PORTS_PER_JOB, _NUM_BLOCKS = 20000, 8, 1596
"""Above the default ports of Ray's workers, below the system's ephemeral ports."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node in `scontrol show node`."""

    address: str
    num_cpus: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes of this job. Each of the `components` of a heterogeneous job maps nodes to the CPUs that it has there;
    other jobs have one component."""

    job_id: int
    components: tuple[dict[str, int], ...]
    array_task: str = ""
    """ARRAY_TASK in a job array, where the job's number alone may also mean the whole array."""

    @property
    def name(self) -> str:
        """Names this job only, for Slurm's commands."""
        return self.array_task or str(self.job_id)

    @property
    def nodes(self) -> list[str]:
        return [node for component in self.components for node in component]

    @property
    def head(self) -> str:
        """The node of the batch script and of Ray's head."""
        return self.nodes[0]

    @staticmethod
    def of(environment: Mapping[str, str]) -> Allocation:
        """The job that Slurm's variables describe. Raises ValueError outside a job."""
        if "SLURM_JOB_ID" not in environment:
            raise ValueError("SLURM_JOB_ID: not set, so this is no Slurm job; submit it with `sbatch launch.sh`")
        size = int(environment.get("SLURM_HET_SIZE", "0"))
        components = []
        for suffix in [f"_HET_GROUP_{index}" for index in range(size)] or [""]:
            nodes = expand_hostlist(environment[f"SLURM_JOB_NODELIST{suffix}"])
            counts = expand_counts(environment.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", f"1(x{len(nodes)})"))
            components.append(dict(zip(nodes, counts, strict=True)))
        task = "_".join(environment.get(f"SLURM_ARRAY_{part}_ID", "") for part in ("JOB", "TASK")).strip("_")
        return Allocation(int(environment["SLURM_JOB_ID"]), tuple(components), task)


def ports_of(job_id: int) -> range:
    """TCP ports of this job's Ray: of its head, its dashboard, the dashboard's agents and Ray's client server."""
    first = _FIRST_PORT + _PORTS_PER_JOB * (job_id % _NUM_BLOCKS)
    return range(first, first + 4)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Commands in the order they are started. `rays` run Ray until `STOP`, by the name of their log.

    A command that begins with `srun` is a step of the job; the others run where the batch script does.
    """

    environment: dict[str, str]
    rays: dict[str, list[str]]
    launch: list[str]

    def describe(self) -> str:
        """The plan as a shell script."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        rays = [f"{shlex.join(command)} &" for command in self.rays.values()]
        return "\n".join([*exports, f"unset {' '.join(SBATCH_OPTIONS)}", *rays, shlex.join(self.launch)])


def choose_bootstrap(wanted: str, allocation: Allocation, *, has_symmetric: bool, whole_nodes: bool) -> str:
    """How Ray is started: by `ray symmetric-run` where that is safe, node by node otherwise.

    It ends with `ray stop`, which ends every Ray of the host, so the job must have its nodes exclusively; and it gives
    every node the same options, so the job must have one component.
    """
    if wanted not in ("auto", SYMMETRIC, EXPLICIT):
        raise ValueError(f"SPECDEC_RAY={wanted}: unknown; choose auto, {SYMMETRIC} or {EXPLICIT}")
    if wanted == SYMMETRIC and not has_symmetric:
        raise ValueError(f"SPECDEC_RAY={wanted}: this Ray has no symmetric-run; use {EXPLICIT}")
    suits = len(allocation.nodes) > 1 and len(allocation.components) == 1 and whole_nodes
    return SYMMETRIC if wanted == SYMMETRIC or (wanted == "auto" and has_symmetric and suits) else EXPLICIT


def make_plan(
    allocation: Allocation,
    addresses: Mapping[str, str],
    overrides: Sequence[str],
    *,
    python: str,
    run_dir: str,
    bootstrap: str = EXPLICIT,
    dashboard: bool = True,
    wait_s: float = 60.0,
    devices: Mapping[str, str] = {},
    resumes: bool = False,
    tmp: str = "/tmp",
) -> JobPlan:
    """The whole job. `addresses` maps nodes to addresses that all nodes can reach; `run_dir` is on a shared disk.

    `devices` are the generic resources of the job on each node, which a step there has to request (`parse_devices`).
    """
    head_port, dashboard_port, agent_port, client_port = ports_of(allocation.job_id)
    folder, head_address = f"{tmp}/specdec-{allocation.job_id}", f"{addresses[allocation.head]}:{head_port}"
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": f"{run_dir}/ray-token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",  # of 30, which is all of Slurm's KillWait
        "RAY_worker_niceness": "0",  # Ray's 15 lets anything else on the node stall a round
        "RAY_NUM_REDIS_GET_RETRIES": "90",  # every 2 s a node asks for the head; after Ray's 20 it ends, on a busy one
        "PYTHONUNBUFFERED": "1",
    }
    if ip_address(addresses[allocation.head]).is_loopback:  # of a job on one node
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray replaces 127.0.0.1 by the node's address
    options = [word for word in overrides if not _is_override(word)]  # such as `-m`, which must come first
    overrides = [word for word in overrides if _is_override(word)]
    launch = [python, "-P", "-m", "cluster.launch", *options, "cluster=slurm", f"cluster.address={head_address}"]
    directory = _value(run_dir)
    launch += [f"cluster.nodes={len(allocation.nodes)}", f"hydra.run.dir={directory}", f"hydra.sweep.dir={directory}"]
    launch += ["job.resume=true"] * resumes + _nodes_of_roles(allocation, addresses, overrides) + overrides
    ray = str(PurePath(python).with_name("ray"))
    options = [f"--dashboard-agent-listen-port={agent_port}", "--min-worker-port=0", "--max-worker-port=0"]
    options += ["--disable-usage-stats"]
    of_head = [f"--include-dashboard={str(dashboard).lower()}", f"--dashboard-port={dashboard_port}"]
    of_head += [f"--ray-client-server-port={client_port}"]
    if bootstrap == SYMMETRIC:
        count = len(allocation.nodes)
        step = ["srun", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpu-bind=none"]
        start = [ray, "symmetric-run", "--address", head_address, "--min-nodes", str(count), *options]
        script = _symmetrically(start, of_head, folder, wait_s)
        return JobPlan(environment, {SYMMETRIC: [*step, "--label", "bash", "-c", script]}, launch)
    rays = {}
    for index, component in enumerate(allocation.components):
        for node, cpus in component.items():
            here = [f"--node-ip-address={addresses[node]}", f"--num-cpus={cpus}", f"--temp-dir={folder}/ray", *options]
            if node == allocation.head:
                start, step = [ray, "start", "--head", f"--port={head_port}", *here, *of_head, "--block"], []
            else:
                start = [ray, "start", f"--address={head_address}", *here, "--block"]
                step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", f"--nodelist={node}"]
                step += [f"--gres={devices[node]}"] if node in devices else []
                step += [f"--het-group={index}"] * (len(allocation.components) > 1)
            script = _in_folder(folder, _until_stopped(shlex.join(start), "kill -TERM $ray"))
            rays[node] = [*step, "bash", "-c", script]
    return JobPlan(environment, rays, launch)


def _symmetrically(start: Sequence[str], of_head: Sequence[str], folder: str, wait_s: float) -> str:
    """A script that runs Ray on one node of a step; `ray stop` ends what `ray symmetric-run` started."""
    # Otherwise a node looks for a lost head for a minute. Set for Ray only: the engine must tolerate a longer outage.
    settings = f"RAY_TMPDIR={shlex.quote(folder)} RAY_gcs_rpc_server_reconnect_timeout_s=5 "
    settings += f"RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT={wait_s:.0f}"
    options = f'[ "$SLURM_PROCID" != 0 ] || of_head="{shlex.join(of_head)}"'
    command = f"{settings} {shlex.join(start)} $of_head -- sleep infinity"
    running = f"{options}; {_until_stopped(command, 'kill -KILL -$ray')}; {shlex.quote(start[0])} stop"
    return _in_folder(folder, running)


def _in_folder(folder: str, script: str) -> str:
    """The script with a folder that only the user can open, while it runs: Ray lets everybody write into its own."""
    quoted = shlex.quote(folder)
    return f"rm -rf {quoted}; mkdir -m 700 {quoted} || exit 1; {script}; rm -rf {quoted}"


def _until_stopped(command: str, ends_it: str) -> str:
    """A script that waits for the command and forwards `STOP`, because Slurm may signal the shell alone.

    It ignores SIGTERM, with which Slurm ends a job: the launch handles that, and Ray is stopped after it.
    """
    traps = f"set -m; trap : TERM; trap '{ends_it}' {STOP.name.removeprefix('SIG')}"
    return f"{traps}; {command} & ray=$!; while kill -0 $ray; do wait $ray; done 2>/dev/null"


def _value(text: str) -> str:
    """The text as Hydra takes it for a value: quoted, if it has characters that mean something there."""
    return text if re.fullmatch(r"[\w./:+@~-]*", text) else '"' + text.replace('"', '\\"') + '"'


def _is_override(word: str) -> bool:
    """Whether it is Hydra's KEY=VALUE, +KEY=VALUE or ~KEY, and no command-line option or value of one."""
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def _nodes_of_roles(allocation: Allocation, addresses: Mapping[str, str], overrides: Sequence[str]) -> list[str]:
    """The nodes of each role: in a job of two components the target runs on the first and the drafter on the second."""
    if len(allocation.components) != 2 or any(part.startswith("placement.nodes") for part in overrides):
        return []
    target, draft = (",".join(addresses[node] for node in part) for part in allocation.components)
    return [f"placement.nodes={{target:[{target}],draft:[{draft}]}}"]


def parse_nodes(text: str) -> dict[str, NodeFacts]:
    """The nodes in what `scontrol -o show node` prints: a line per node of KEY=VALUE words."""
    found = {}
    for line in text.splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "NodeName" in words:
            address = words.get("NodeAddr", words["NodeName"])
            found[words["NodeName"]] = NodeFacts(address, int(words.get("CPUTot", "0")))
    return found


def parse_devices(text: str) -> dict[str, str]:
    """The devices in what `scontrol -d show job` prints: node -> its generic resources, such as `gpu:4`, as `--gres`
    takes them."""
    found = re.findall(r"\bNodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=(\S+)", text)
    return {node: re.sub(r"\([^)]*\)", "", gres) for nodes, gres in found for node in expand_hostlist(nodes)}


def expand_hostlist(text: str) -> list[str]:
    """`n[1-2,09],gpu5` -> n1, n2, n09, gpu5. Numbers keep their leading zeros; several brackets multiply."""
    hosts = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", item)
        choices = [_expand_range(part) if index % 2 else [part] for index, part in enumerate(parts)]
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    return hosts


def _expand_range(text: str) -> list[str]:
    names = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        names += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return names


def expand_counts(text: str) -> list[int]:
    """`4(x2),1` -> 4, 4, 1."""
    items = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in items for _ in range(int(times or 1))]
