"""A real Slurm on hosts of this machine: daemons, key and configuration of its own, gone with its hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, network

DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch")
WAIT_S = 200
# proctrack/pgid signals what Slurm itself started and little else, as proctrack/cgroup does and proctrack/linuxproc
# does not. At the end of a job, processes that left its process group go on: the job has to end them itself.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=switch({switch})
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdSpoolDir={directory}/spool.%n
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
ReturnToService=2
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Jobs are submitted from the first host, in `directory`, which all hosts share."""

    def __init__(self, directory: Path, hosts: list[Host], environment: Mapping[str, str]) -> None:
        self.directory, self.hosts = directory, hosts
        self._environment = {**environment, "SLURM_CONF": str(directory / "slurm.conf")}

    def ask(self, *command: object, host: int = 0) -> str:
        return self.hosts[host].run(*command, cwd=self.directory, env=self._environment)

    def submit(self, *command: object, **environment: str) -> int:
        """`sbatch` with these arguments; the number of the job."""
        options = {"cwd": self.directory, "env": {**self._environment, **environment}}
        return int(self.hosts[0].run("sbatch", "--parsable", *command, **options))

    def state(self, job: int) -> str:
        """State of the job, or of all tasks of an array: a word for each."""
        return " ".join(self.ask("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").split())

    def is_over(self, job: int) -> bool:
        """Whether it ended and all its nodes are done with it."""
        return set(self.state(job).split()) <= {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"}

    def outcome(self, job: int) -> str:
        """How it ended, for the message of a test: the end of what it and its Ray wrote."""
        logs = sorted((self.directory / "outputs" / "slurm" / str(job)).glob("ray-*.log"))
        return "\n".join([f"job {job}:", self.output(job)[-3000:], *(log.read_text()[-1000:] for log in logs)])

    def output(self, job: int) -> str:
        path = self.directory / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job: int, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.outcome(job)
            time.sleep(0.2)


@contextlib.contextmanager
def slurm(directory: Path, environment: Mapping[str, str]) -> Iterator[Slurm]:
    """A cluster of two nodes with two CPUs each; skips, saying why, where there can be none."""
    absent = [daemon for daemon in DAEMONS if shutil.which(daemon) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge")
    with network(directory, "n1", "n2") as (switch, hosts):
        key, conf = directory / "munge.key", directory / "slurm.conf"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=2 RealMemory=1000 Gres=gpu:1" for host in hosts]
        conf.write_text(CONFIGURATION.format(switch=switch.address, directory=directory, nodes="\n".join([*nodes, ""])))
        gpu = directory / "gpu"  # Slurm looks whether it is there
        os.mknod(gpu, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (directory / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={gpu}\n")
        paths = [f"--{what}-file={directory}/munge.{what}" for what in ("pid", "log", "seed")]
        keyed = [f"--key-file={key}", f"--socket={directory}/munge.sock", *paths, "--force"]
        switch.run("munged", *keyed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, capture_output=False)
        with_conf = {"env": {**environment, "SLURM_CONF": str(conf)}}
        switch.start("slurmctld", "-D", "-f", conf, log=directory / "slurmctld.out", **with_conf)
        for host in hosts:
            host.start("slurmd", "-D", "-N", host.name, "-f", conf, log=directory / f"{host.name}.out", **with_conf)
        cluster = Slurm(directory, hosts, environment)
        deadline = time.monotonic() + WAIT_S
        while cluster.ask("sinfo", "-h", "-o", "%t %D").strip() != "idle 2":
            assert time.monotonic() < deadline, (directory / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.1)
        yield cluster
