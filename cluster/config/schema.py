"""The records of a launch: machines, the whole configuration, and every choice of every group with its defaults.

The records of the roles live in `actors/options.py` and beside the drafters, those of the jobs in `jobs.py`. It must
not know Hydra, files or how a configuration is composed (`compose.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from omegaconf import MISSING

from actors.drafters.config import DrafterConfig
from actors.drafters.registry import DRAFTERS
from actors.logs import LogLevel
from actors.options import (
    PipelineConfig,
    PipelineName,
    SamplingConfig,
    SchedulerConfig,
    TargetConfig,
    VerifyConfig,
    VerifyRule,
)
from actors.protocol.messages import SamplingParams
from cluster.config.jobs import JOBS
from parallel.ranges import OneOf, Range, Section, require

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class PlacementName(StrEnum):
    """Whether target and drafter have devices of their own."""

    separate = "separate"
    colocated = "colocated"


class ClusterName(StrEnum):
    """What the roles run on."""

    local = "local"
    inprocess = "inprocess"
    existing = "existing"
    slurm = "slurm"


@dataclass(frozen=True, slots=True)
class PlacementConfig(Section):
    """The devices of the roles."""

    name: PlacementName = PlacementName.separate
    """separate: target and drafter on different devices; colocated: on the same ones."""
    nodes: dict[str, list[str]] = field(default_factory=dict)
    """Role -> names or addresses of the nodes it may use, as {target:[n1,n2],draft:[n3]}; a role not named: any."""


@dataclass(frozen=True, slots=True)
class ClusterConfig(Section):
    """The machines and processes that the roles run in."""

    name: ClusterName = ClusterName.local
    """local: Ray on this machine; inprocess: threads of this process, no Ray; existing: a running Ray cluster;
    slurm: the nodes of a Slurm job, where `sbatch launch.sh` sets it."""
    address: str = ""
    """Address of the running cluster, HOST:PORT or `auto`: for cluster=existing; set by launch.sh in a Slurm job."""
    nodes: Annotated[int, Range(0, zero="those that are there")] = 0
    """Nodes to wait for before ranks are placed; 0 = those that are there."""
    wait_s: Annotated[float, Range(0)] = 60.0
    """Seconds to wait for nodes and free devices of a cluster before the launch fails with what is missing; also for a
    target or coordinator whose node was lost."""
    interface: str = ""
    """Network interface, on every node, that the roles talk over, such as ib0; empty = the one Ray uses."""
    num_cpus: Annotated[int | None, Range(1, remedy="write null for all")] = None
    """CPU cores to use on this machine; null = all this process may use."""
    oversubscribe: bool = False
    """Allow more ranks than cores; they take turns and timings mean little."""
    dashboard: bool = True
    """Start Ray's dashboard."""
    port: Annotated[int, Range(0, 65535)] = 0
    """TCP port of the coordinator; 0 = any that is free."""
    link_delay_ms: Annotated[float, Range(0, zero="none")] = 0.0
    """Milliseconds by which every record between coordinator and drafter is delayed, each way, to measure what a slow
    network costs; 0 = none."""
    startup_timeout_s: Annotated[float, Range(above=0)] = 120.0
    """Seconds for the roles to load, or for a replaced target or coordinator to be ready, before the launch fails; two
    more for each GiB of weights that a rank reads."""
    namespace: str = "specdec"
    """Ray namespace of the actors."""
    log_level: LogLevel = LogLevel.info
    """Events in `logs/` of the run's directory: error, warning, info, or debug with every round."""
    max_restarts: Annotated[int, Range(0, zero="none")] = 3
    """Times within an hour that each process is replaced when it dies; the next death of a target or coordinator ends
    the engine, that of a drafter leaves it out. 0 = the first death ends the engine."""
    silence_s: Annotated[float, Range(1, zero="never")] = 2.0
    """Seconds without a heartbeat after which a process counts as hanging and is ended and replaced; 0 = never."""

    def check_fields(self, where: str) -> None:
        address, here = self.address, self.name in ("local", "inprocess")
        if here:
            remedy = "is only for cluster=existing; add that or drop it"
            require(not address, f"{where}.address", address, remedy)
            require(self.nodes <= 1, f"{where}.nodes", self.nodes, "is only for clusters of several nodes; drop it")
        else:
            other = ", or auto" if self.name == "existing" else ", or submit the job with `sbatch launch.sh`"
            require(bool(address), f"{where}.address", address, f"give HOST:PORT of the Ray cluster{other}")
        remedy = "is for processes; with cluster=inprocess drop it"
        require(self.name != "inprocess" or not self.interface, f"{where}.interface", self.interface, remedy)
        remedy = "is for one machine, where there is no network; use cluster=local or cluster=inprocess, or drop it"
        require(here or not self.link_delay_ms, f"{where}.link_delay_ms", self.link_delay_ms, remedy)


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@,A-Z]+")
"""The origin of a page, as browsers send it: in lower case, without a path."""


@dataclass(frozen=True, slots=True)
class ServerConfig(Section):
    """The HTTP server of job=serve: where it listens, who may use it, and what its requests may cost."""

    host: str = "127.0.0.1"
    """Address to listen on: this machine alone by default, 0.0.0.0 for every network."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """TCP port; 0 = any that is free."""
    model_name: str = ""
    """Name of the model in requests, replies and metrics; empty = the hub id of its checkpoint, or the name of its
    directory."""
    api_key: str = ""
    """Key that requests must bring as `Authorization: Bearer KEY`, for all but /health and the page at /; empty = none
    is asked for. It can be read in the process list and in the run directory: prefer a file."""
    api_key_file: str = ""
    """File with such keys, one in each line."""
    cors_origins: list[str] = field(default_factory=list)
    """Origins, such as https://chat.example, whose pages a browser lets use this server; '*' is every page, also one
    that means harm to a server without a key."""
    metrics_alias: Annotated[str, OneOf(("none", "vllm"))] = "none"
    """vllm: /metrics also has the names of vLLM, `vllm:...`, for gateways, dashboards and benchmarks."""
    traces_endpoint: str = ""
    """URL that receives a span of OpenTelemetry for each answered request (OTLP over HTTP), such as
    http://localhost:4318/v1/traces; empty = none is sent."""
    max_body_mb: Annotated[float, Range(above=0)] = 16.0
    """MiB that the body of a request may have."""
    max_waiting: Annotated[int, Range(0)] = 256
    """Completions that may wait for a place in the batch, beside `scheduler.max_num_seqs` that run. A request with
    more of them is answered with 429 and a time after which to come again."""
    max_queue_s: Annotated[float, Range(above=0)] = 120.0
    """Seconds that a completion may wait for its first token. While others wait, a request whose wait would be longer,
    by how fast they begin, is answered with 429 and the time after which to come again."""
    timeout_s: Annotated[float, Range(above=0)] = 600.0
    """Seconds after which a request that has not ended is aborted."""
    drain_s: Annotated[float, Range(0)] = 60.0
    """Seconds that running requests get to end after SIGTERM or Ctrl-C."""

    def check_fields(self, where: str) -> None:
        url = self.traces_endpoint
        is_url = not url or url.startswith(("http://", "https://"))
        require(is_url, f"{where}.traces_endpoint", url, "is no URL; give http://HOST:4318/v1/traces")
        remedy = "is one key; put it into the file, and drop this"
        require(not (self.api_key and self.api_key_file), f"{where}.api_key", "...", remedy)
        for origin in self.cors_origins:
            remedy = "is no origin; give SCHEME://HOST or SCHEME://HOST:PORT without a path, or '*'"
            require(bool(_ORIGIN.fullmatch(origin)), f"{where}.cors_origins", origin, remedy)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The whole configuration of one launch. The docstrings introduce the groups and sections in `--help`."""

    target: TargetConfig = MISSING
    """The model whose output is preserved; hf needs target.path=DIR-or-hub-id."""
    drafter: DrafterConfig = MISSING
    """The algorithm that drafts tokens; cascade = drafters that draft for each other."""
    verify: VerifyConfig = MISSING
    """The rule that decides which draft tokens stand."""
    pipeline: PipelineConfig = MISSING
    """The order of drafting and verification; plain = no speculation."""
    placement: PlacementConfig = MISSING
    """Whether target and drafter have devices of their own."""
    cluster: ClusterConfig = MISSING
    """Ray on this machine, threads without Ray, a running Ray cluster, or a Slurm job."""
    job: Any = MISSING
    """What to do."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Bounds on one target pass."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How requests are sampled."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """The HTTP server of job=serve."""

    def sampling_params(self, tokenizer: Tokenizer) -> SamplingParams:
        """`sampling` as a request carries it. A bad word is banned with and without a space before it, as in vLLM."""
        from cluster.io.text import bad_word_tokens

        return self.sampling.params(bad_word_tokens(tokenizer, self.sampling.bad_words))


class DrafterChoices(Mapping[str, DrafterConfig]):
    """The choices of `drafter=`; the module of one is loaded when it is looked up."""

    def __getitem__(self, name: str) -> DrafterConfig:
        return DRAFTERS[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(DRAFTERS)

    def __len__(self) -> int:
        return len(DRAFTERS)


CHOICES: Mapping[str, Mapping[str, Any]] = {
    "target": {"pocket": TargetConfig(), "hf": TargetConfig(name="hf", path="")},
    "drafter": DrafterChoices(),
    "verify": {str(rule): VerifyConfig(rule) for rule in VerifyRule},
    "pipeline": {str(name): PipelineConfig(name) for name in PipelineName},
    "placement": {str(name): PlacementConfig(name) for name in PlacementName},
    "cluster": {str(name): ClusterConfig(name) for name in ClusterName},
    "job": {job.name: job for job in JOBS},
}
"""Group -> choice -> its record with the defaults of the command line."""
