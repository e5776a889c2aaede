"""The typed configuration of a launch: its records, their registration with Hydra, and its composition.

The records of target, drafters, verification, pipeline, scheduler and sampling live in `actors/options.py`, those of
training, benches, certificates and plans in `config.py` of their packages; machines and `job=generate` are described
here. A `DictConfig` comes in through `typed_config` and nothing but frozen records goes out; nothing is ever written
back into one. Symbolic paths become real ones here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import DrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.registry import DRAFTERS
from actors.options import PipelineConfig, PipelineName, SamplingConfig, SchedulerConfig, TargetConfig, VerifyConfig
from actors.protocol.messages import SamplingParams
from actors.worker.logs import LogLevel
from cluster import pocket
from cluster.config.cascade import with_typed_levels
from cluster.config.errors import describe, unknown_key
from cluster.config.validation import validate
from cluster.tools.bench.config import BenchConfig
from cluster.tools.certify.config import CertifyConfig
from cluster.tools.chaos.config import DrillConfig
from cluster.tools.planning.config import PassesConfig, PlanConfig
from cluster.tools.training.config import TrainConfig

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
class PlacementConfig:
    """Which devices the roles get."""

    name: PlacementName = PlacementName.separate
    """separate: target and drafter on different devices; colocated: on the same ones."""
    nodes: dict[str, list[str]] = field(default_factory=dict)
    """Role -> names or addresses of the nodes it may use, as {target:[n1,n2],draft:[n3]}; a role not named: any."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Where actors are started."""

    name: ClusterName = ClusterName.local
    """local: Ray on this machine; inprocess: threads of this process, no Ray; existing: a running Ray cluster;
    slurm: the nodes of a Slurm job, where `sbatch launch.sh` sets it."""
    address: str = ""
    """Of the running cluster, HOST:PORT or `auto`; with cluster=existing, and set by launch.sh in a Slurm job."""
    nodes: int = 0
    """Nodes to wait for before ranks are placed; 0 = those that are there."""
    wait_s: float = 60.0
    """Wait so long for nodes and free devices of a cluster, saying what is missing, before giving up; the same for a
    target or coordinator whose node was lost."""
    interface: str = ""
    """Network interface the roles talk over, on every node, such as ib0; empty = the one Ray uses."""
    num_cpus: int | None = None
    """CPU cores to use on this machine; null = all this process may use."""
    oversubscribe: bool = False
    """Allow more ranks than cores; they take turns and timings mean little."""
    dashboard: bool = True
    """Start Ray's dashboard."""
    port: int = 0
    """TCP port the coordinator listens on; 0 = any that is free."""
    link_delay_ms: float = 0.0
    """Hold every record between the coordinator and the drafter back so long, each way: what a slow network costs."""
    startup_timeout_s: float = 120.0
    """Give up when the roles have not loaded by then, or a target or coordinator that was replaced is not ready."""
    namespace: str = "specdec"
    """Ray namespace of the actors."""
    log_level: LogLevel = LogLevel.info
    """What the roles tell in `logs/` of the run's directory: error, warning, info, or debug with every round."""
    max_restarts: int = 3
    """Times within an hour that each process is replaced when it dies; the next death of a target or coordinator ends
    the engine, that of a drafter leaves it out. 0 = the first death ends the engine."""
    silence_s: float = 2.0
    """A process that gives no sign of life for so long hangs: it is ended and replaced; 0 = none ever is."""


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """`job=generate`: complete prompts and report how speculation went."""

    name: str = "generate"
    """Set by the choice `job=`."""
    prompts: str = ""
    """JSONL with a `prompt` field or Spec-Bench `turns`; empty = bundled prompts, see `job.workload`."""
    workload: str = "completion"
    """Bundled prompts: completion of held-out code; editing, which copies; agent, whose sessions repeat each other."""
    limit: int = 8
    """Prompts to read; 0 = all."""
    concurrency: int = 1
    """Requests in flight; 0 = all at once."""
    baseline: bool = True
    """Time plain decoding of the same prompts too."""
    resume: bool = False
    """Go on from the `completions.jsonl` in the run directory: prompts that are finished there are not run again."""
    trace: bool = True
    """Record both lanes and write `timeline.json` and `timeline.png`."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Everything one launch is told."""

    target: TargetConfig = MISSING
    drafter: DrafterConfig = MISSING
    verify: VerifyConfig = MISSING
    pipeline: PipelineConfig = MISSING
    placement: PlacementConfig = MISSING
    cluster: ClusterConfig = MISSING
    job: Any = MISSING
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def sampling_params(self, tokenizer: Tokenizer) -> SamplingParams:
        """`sampling` in the engine's words. A bad word is banned with and without a space before it, as in vLLM."""
        bad_words = []
        for word in self.sampling.bad_words:
            plain, spaced = (tokenizer.encode(p + word.lstrip(), add_special_tokens=False).ids for p in ("", " "))
            bad_words.append(tuple(plain))
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                bad_words.append(tuple(spaced))
        return self.sampling.params(tuple(bad_words))


CHOICES: dict[str, dict[str, type]] = {
    "target": {"pocket": TargetConfig, "hf": TargetConfig},
    "drafter": dict(DRAFTERS),
    "verify": dict.fromkeys(("coupled", "rejection", "traversal", "kseq"), VerifyConfig),
    "pipeline": dict.fromkeys(tuple(PipelineName), PipelineConfig),
    "placement": dict.fromkeys(("separate", "colocated"), PlacementConfig),
    "cluster": dict.fromkeys(("local", "inprocess", "existing", "slurm"), ClusterConfig),
    "job": {
        "generate": GenerateConfig,
        "bench": BenchConfig,
        "certify": CertifyConfig,
        "drill": DrillConfig,
        "plan": PlanConfig,
        "passes": PassesConfig,
        "train": TrainConfig,
    },
}
"""Group -> choice -> its record. A choice is one file `conf/<group>/<choice>.yaml` over `schema/<group>/<choice>`."""


@cache
def register() -> None:
    """Tell Hydra the schema of every choice, once."""
    store = ConfigStore.instance()
    store.store(name="launch_schema", node=_schema(LaunchConfig))
    for group, choices in CHOICES.items():
        for choice, record in choices.items():
            store.store(group=f"schema/{group}", name=choice, node=_schema(record), package=group)


def load_config(overrides: Sequence[str] = ()) -> LaunchConfig:
    """What `python -m cluster.launch` would run with these overrides; ValueError, one line, if it would refuse."""
    register()
    try:
        with _no_application_running(), initialize_config_module("conf", version_base="1.3"):
            composed = compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(describe(error)) from error
    return typed_config(composed)


def typed_config(composed: DictConfig) -> LaunchConfig:
    """The composed configuration as a checked `LaunchConfig` whose paths exist; ValueError, one line, otherwise."""
    _refuse_unknown_keys(composed)
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(describe(error)) from error
    assert isinstance(config, LaunchConfig)
    return checked(config)


def checked(config: LaunchConfig) -> LaunchConfig:
    """The same configuration if it makes sense, with paths that exist; ValueError, one line, otherwise."""
    if isinstance(config.drafter, CascadeDrafterConfig):
        config = replace(config, drafter=with_typed_levels(config.drafter, CHOICES["drafter"]))
    validate(config)
    config = _with_real_paths(config)
    config.drafter.check_checkpoints()
    return config


@contextmanager
def _no_application_running() -> Iterator[None]:
    """Hydra allows one application per process: step aside for one that runs, such as the launch of this very job."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running


def _schema(record: type) -> DictConfig:
    """The record as a schema Hydra can merge into: a frozen dataclass would otherwise make it read-only.

    Open mappings (token id -> bias) lose Hydra's strictness, so that `sampling.logit_bias={42:-5}` needs no plus.
    """
    schema = OmegaConf.structured(record)
    pending = [schema]
    while pending:
        node = pending.pop()
        OmegaConf.set_readonly(node, None)
        if is_dataclass(OmegaConf.get_type(node)) and not node._is_missing():
            nested = (node._get_node(item.name) for item in fields(OmegaConf.get_type(node)))
            pending += [child for child in nested if OmegaConf.is_config(child)]
        elif OmegaConf.get_type(node) is dict:
            OmegaConf.set_struct(node, False)
    return schema


def _refuse_unknown_keys(node: DictConfig, section: str = "") -> None:
    """Hydra's plus (`+x=1`) adds keys that no record has."""
    known = [item.name for item in fields(OmegaConf.get_type(node))]
    for key in node:
        if key not in known:
            raise ValueError(unknown_key(section, str(key), known))
        child = node._get_node(key)
        if isinstance(child, DictConfig) and is_dataclass(OmegaConf.get_type(child)):
            _refuse_unknown_keys(child, f"{section}.{key}" if section else str(key))


def _with_real_paths(config: LaunchConfig) -> LaunchConfig:
    """Symbolic paths and hub ids become directories; relative paths become absolute, for actors that run elsewhere."""
    if isinstance(config.job, TrainConfig):
        return config  # training is what makes the bundled pair
    bundled = {"pocket": pocket.TARGET}
    target = replace(config.target, path=_checkpoint("target.path", config.target.path, bundled))
    drafter, job = config.drafter, config.job
    if isinstance(drafter, CascadeDrafterConfig):
        levels = [_drafter_paths(level, target, f"drafter.levels[{i}]") for i, level in enumerate(drafter.levels)]
        drafter = replace(drafter, levels=tuple(levels))
    else:
        drafter = _drafter_paths(drafter, target, "drafter")
    if isinstance(job, GenerateConfig | BenchConfig | CertifyConfig | DrillConfig | PlanConfig):
        job = replace(job, prompts=_prompts(job.prompts, getattr(job, "workload", "completion")))
    if isinstance(job, PlanConfig) and job.costs:
        job = replace(job, costs=_costs(job.costs))
    return replace(config, target=target, drafter=drafter, job=job)


def _drafter_paths(drafter: DrafterConfig, target: TargetConfig, where: str) -> DrafterConfig:
    if isinstance(drafter, ModelDrafterConfig):
        bundled = {"pocket": pocket.DRAFTER, "pocket-deep": pocket.DEEP_DRAFTER}
        return replace(drafter, path=_checkpoint(f"{where}.path", drafter.path, bundled))
    if isinstance(drafter, SuffixDrafterConfig) and drafter.corpus:
        tokenizer = _checkpoint(f"{where}.tokenizer", drafter.tokenizer or target.path, {"pocket": pocket.TARGET})
        return replace(drafter, corpus=_corpus(drafter.corpus), tokenizer=tokenizer)
    return drafter


def _checkpoint(field_name: str, path: str, bundled: dict[str, Path]) -> str:
    directory = bundled.get(path, Path(path).expanduser())
    remedy = "give a directory with a Hugging Face checkpoint, or a hub id such as Qwen/Qwen3-0.6B"
    if not directory.is_dir():
        from parallel.model.weights import resolve_checkpoint  # loads PyTorch: only for what is not a directory

        try:
            directory = resolve_checkpoint(path)
        except ValueError as error:
            raise ValueError(f"{field_name}={error}; {remedy}") from error
    if not (directory / "config.json").is_file():
        raise ValueError(f"{field_name}={path}: has no config.json; {remedy}")
    return str(directory.absolute())


def _corpus(path: str) -> str:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"drafter.corpus={path}: no such file; give a text file, or JSONL with a `text` field")
    return str(file.absolute())


def workload_prompts(workload: str) -> Path:
    """The bundled prompts of a `job.workload`."""
    return pocket.PROMPTS if workload == "completion" else pocket.PROMPTS.with_name(f"{workload}.jsonl")


def _prompts(path: str, workload: str) -> str:
    bundled = workload_prompts(workload)
    file = Path(path).expanduser() if path else bundled
    if bundled != pocket.PROMPTS and file != bundled:
        raise ValueError(f"job.workload={workload}: names bundled prompts, but job.prompts is given; drop one of them")
    if not file.is_file():
        raise ValueError(f"job.prompts={path}: no such file; give a JSONL file with a `prompt` or `turns` field")
    return str(file.absolute())


def _costs(path: str) -> str:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"job.costs={path}: no such file; give the YAML of docs/planning.md, or leave it empty")
    return str(file.absolute())
