"""Turns the words of the command line into a checked `LaunchConfig`.

The only file but `errors.py` and `launch.py` that knows Hydra. A `DictConfig` comes in through `typed_config` and
nothing but frozen records goes out; nothing is ever written back into one. Names of bundled checkpoints, hub ids and
relative paths become absolute paths here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from actors.drafters.config import DrafterConfig, PlacedDrafterConfig, Placement
from actors.drafters.registry import DRAFTERS
from actors.options import CHECKPOINT, PipelineName, VerifyRule
from actors.verification.compatibility import choose_rule
from cluster import pocket
from cluster.config.jobs import (
    SPECDEC,
    WITH_DIFFUSION,
    WITH_ENCODER,
    BenchConfig,
    PlanConfig,
    PromptsJobConfig,
    TrainConfig,
)
from cluster.config.schema import CHOICES, LaunchConfig
from cluster.config.validation import validate
from parallel.model.checkpoint import resolve_checkpoint
from parallel.model.config import DecoderConfig
from parallel.model.families.registry import read_config
from parallel.ranges import errors_of, require
from parallel.typed_json import as_type

T = TypeVar("T")

ONE_MODEL = ("plan", "tree")
"""Jobs that measure one model that drafts, which may be that of `drafter=auto`."""


@cache
def register() -> None:
    """Register the configuration and every choice of every group with Hydra, once."""
    store = ConfigStore.instance()
    # Hydra copies its sources, and with them this store, for every composition and every group that its help lists;
    # it reads copies of the records only.
    vars(store)["__deepcopy__"] = lambda _: store
    store.store(name="launch_schema", node=_schema(LaunchConfig))
    for group, choices in CHOICES.items():
        store.repo[group] = _StoredGroup(group, choices)


class _StoredGroup(dict[str, ConfigNode | None]):
    """The choices of a group as Hydra's store keeps them, each made when it is read: a drafter's loads its module."""

    def __init__(self, group: str, choices: Mapping[str, Any]) -> None:
        super().__init__({f"{choice}.yaml": None for choice in choices})
        self._group = group
        self._choices = choices

    def __getitem__(self, file: str) -> ConfigNode:
        node = self.get(file)
        if node is None:
            record = _schema(self._choices[file.removesuffix(".yaml")])
            node = self[file] = ConfigNode(name=file, node=record, group=self._group, package=None, provider=None)
        return node


def load_config(overrides: Sequence[str] = ()) -> LaunchConfig:
    """What `python -m cluster.launch` would run with these overrides; ValueError, one line, if it would refuse."""
    register()
    try:
        with _no_application_running(), initialize_config_module("conf", version_base="1.3"):
            composed = compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(_described(error)) from error
    return typed_config(composed)


def typed_config(composed: DictConfig) -> LaunchConfig:
    """The composed configuration as a checked `LaunchConfig` whose paths exist; ValueError, one line, otherwise."""
    _refuse_unknown_keys(composed)
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(_described(error)) from error
    _refuse_wrong_types(config)
    assert isinstance(config, LaunchConfig)
    return checked(config)


def checked(config: LaunchConfig) -> LaunchConfig:
    """The same configuration if it makes sense, with paths that exist; ValueError, one line, otherwise."""
    config = replace(config, drafter=config.drafter.with_typed_parts(_typed_part, "drafter"))
    if config.job.name in ONE_MODEL:
        config = replace(config, drafter=_only_model(config.drafter))
    config = _with_own_ranks(config)
    if not isinstance(config.job, BenchConfig):  # which has a rule for each of its drafters
        config = with_chosen_rule(config)
    validate(config)
    config = _with_real_paths(config)
    target = read_config(config.target.path).stretched(config.target.stretch)
    target.check_ranks(config.target.tp, "target.tp")
    is_specdec = isinstance(config.job, TrainConfig) and config.job.recipe == SPECDEC
    if target.encoder is not None and config.job.name not in WITH_ENCODER and not is_specdec:
        raise ValueError(
            f"job={config.job.name}: is for targets without an encoder; of {config.target.path} use one of "
            f"{', '.join(WITH_ENCODER)}, or train with job.recipe={SPECDEC}"
        )
    if target.encoder is None and is_specdec:
        raise ValueError(f"job.recipe={SPECDEC}: is for a target with an encoder; name one with target.path")
    config = _with_own_decoder(config, target)
    config.drafter.check_checkpoints()
    return config


def _with_own_decoder(config: LaunchConfig, target: DecoderConfig) -> LaunchConfig:
    """A target that fills masks guesses its states itself: no drafter, which is `pipeline=plain`."""
    if target.diffusion is None:
        remedy = "is for masked-diffusion checkpoints, and this one writes token by token; drop it"
        require(config.target.decoder == "auto", "target.decoder", config.target.decoder, remedy)
        return config
    if config.job.name not in WITH_DIFFUSION:
        raise ValueError(
            f"job={config.job.name}: is for targets that write token by token; of {config.target.path} use one of "
            f"{', '.join(WITH_DIFFUSION)}"
        )
    remedy = "keeps rows of models that see the whole text (LLaDA, Dream); this one's rows are exact, use static"
    is_known = target.diffusion.sees_all or config.target.decoder in ("auto", "static")
    require(is_known, "target.decoder", config.target.decoder, remedy)
    remedy = "drafts for targets that write token by token, and this one fills masks; drop it"
    require(config.drafter.name in ("auto", "none"), "drafter", config.drafter.name, remedy)
    return replace(config, pipeline=replace(config.pipeline, name=PipelineName.plain))


def _only_model(drafter: DrafterConfig) -> DrafterConfig:
    """The draft model of `drafter=auto` if it has one, for a job that measures a model by itself; else as it is."""
    from actors.drafters.auto.config import AutoDrafterConfig

    models = [one for one in drafter.drafters if one.name == "model"] if isinstance(drafter, AutoDrafterConfig) else []
    return models[0] if len(models) == 1 else drafter


def _with_own_ranks(config: LaunchConfig) -> LaunchConfig:
    """`drafter.placement=auto` replaced by separate where other sections speak of a role of the drafter's own: it has a
    node or a link to itself, is to be killed, or is lent to others."""
    drafter, cluster = config.drafter, config.cluster
    has_node = cluster.nodes > 1 or bool(config.placement.nodes.keys() - {"target"})
    asked = has_node or cluster.link_delay_ms > 0 or config.job.name in ("drill", "pool")
    if not asked or not isinstance(drafter, PlacedDrafterConfig) or drafter.placement is not Placement.auto:
        return config
    separate = replace(drafter, placement=Placement.separate)
    return config if separate.is_attached(config.pipeline.name) else replace(config, drafter=separate)


def with_chosen_rule(config: LaunchConfig) -> LaunchConfig:
    """`verify=auto` replaced by the rule it stands for, given the drafter, the pipeline and the temperatures."""
    if config.verify.rule is not VerifyRule.auto:
        return config
    drafter, pipeline = config.drafter.with_typed_parts(_typed_part, "drafter"), config.pipeline.name
    rule = VerifyRule.coupled
    temperatures = getattr(config.job, "temperatures", None) or [config.sampling.temperature]
    with suppress(ValueError):  # options that nothing but the coupled rule can be combined with
        drafter.check_with(VerifyRule.block, pipeline)
        kinds, traits = (
            drafter.sampling_kinds(VerifyRule.block, pipeline),
            drafter.draft_traits,
        )
        rule = choose_rule(kinds, traits, is_greedy=not any(temperatures))
    return replace(config, verify=replace(config.verify, rule=rule))


def _typed_part(entry: Any, where: str, excluded: Set[str], noun: str) -> DrafterConfig:
    """The record of a drafter inside another (`TypedPart`), and those of the drafters inside it."""
    if isinstance(entry, DrafterConfig):
        return entry.with_typed_parts(_typed_part, where)
    keys = {"name": entry} if isinstance(entry, str) else entry
    known = [name for name in DRAFTERS if name not in excluded]
    if not isinstance(keys, dict) or keys.get("name") not in known:
        raise ValueError(
            f"{where}={entry}: is no {noun}; give a name or {{name: NAME, ...}}, one of {', '.join(known)}"
        )
    return drafter_record(keys, where).with_typed_parts(_typed_part, where)


def drafter_record(keys: Mapping[str, Any], where: str) -> DrafterConfig:
    """The record of the known drafter `keys["name"]` from keys of the command line; `where` prefixes error lines."""
    return typed_record(DRAFTERS[keys["name"]], keys, where)


def typed_record(defaults: T | type[T], keys: Mapping[str, Any], where: str) -> T:
    """A record with the fields that `keys` name replaced; ValueError, one line, for what it cannot hold."""
    try:
        record = OmegaConf.to_object(OmegaConf.merge(_schema(defaults), dict(keys)))
    except OmegaConfBaseException as error:
        raise ValueError(f"{where}{'.' if error.full_key else ': '}{_described(error)}") from error
    _refuse_wrong_types(record, where)
    return cast(T, record)


@contextmanager
def _no_application_running() -> Iterator[None]:
    """Hydra allows one application per process: set aside the one that runs, such as the launch of this very job."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running


def _schema(record: Any) -> DictConfig:
    """A record, or its class, as a schema that Hydra can merge into: a frozen one would otherwise be read-only.

    Open mappings (token id -> bias) lose Hydra's strictness, so that `sampling.logit_bias={42:-5}` needs no plus.
    """
    schema = OmegaConf.structured(record)
    pending = [schema]
    while pending:
        node = pending.pop()
        OmegaConf.set_readonly(node, None)
        if is_dataclass(OmegaConf.get_type(node)) and not node._is_missing():
            pending += [child for key in node if OmegaConf.is_config(child := node._get_node(key))]
        elif OmegaConf.get_type(node) is dict:
            OmegaConf.set_struct(node, False)
    return schema


def _described(error: Exception) -> str:
    from cluster.config.errors import describe  # for command lines that are refused

    return describe(error)


def _refuse_unknown_keys(node: DictConfig, section: str = "") -> None:
    """Hydra's plus (`+x=1`) adds keys that no record has."""
    record = OmegaConf.get_type(node)
    assert is_dataclass(record)
    known = [item.name for item in fields(record)]
    for key in node:
        if key not in known:
            from cluster.config.errors import unknown_key

            raise ValueError(unknown_key(section, str(key), known))
        child = node._get_node(key)
        if isinstance(child, DictConfig) and is_dataclass(OmegaConf.get_type(child)):
            _refuse_unknown_keys(child, f"{section}.{key}" if section else str(key))


def _refuse_wrong_types(record: Any, section: str = "") -> None:
    """OmegaConf does not check what an interpolation puts into a list or a section, nor mappings in a list."""
    for name, kind in get_type_hints(type(record)).items():
        value, key = getattr(record, name), f"{section}.{name}" if section else name
        if is_dataclass(value) and (kind is Any or (isinstance(kind, type) and isinstance(value, kind))):
            _refuse_wrong_types(value, key)
            continue
        try:
            as_type(value, kind)
        except ValueError as error:
            place = key if str(error).startswith("[") else f"{key}: "
            remedy = "set its keys" if is_dataclass(kind) else f"the default is {getattr(type(record)(), name)!r}"
            raise ValueError(f"{place}{error}; {remedy}") from None


def _with_real_paths(config: LaunchConfig) -> LaunchConfig:
    """Names of bundled checkpoints and hub ids become directories; relative paths absolute, for actors elsewhere."""
    path = _checkpoint("target.path", config.target.path, {"pocket": pocket.TARGET})
    job = config.job
    if isinstance(job, PromptsJobConfig):
        job = replace(job, prompts=_prompts(job))
    if isinstance(job, PlanConfig):
        costs = _file("job.costs", job.costs, "the YAML of docs/planning.md, or leave it empty") if job.costs else ""
        job = replace(job, prompts=_prompt_file(job.prompts or str(pocket.PROMPTS)), costs=costs)
    drafter = config.drafter.with_paths(_DrafterPaths(path, config.target.stretch, config.pipeline.name))
    return replace(config, target=replace(config.target, path=path), drafter=drafter, job=job)


def _checkpoint(key: str, path: str, bundled: Mapping[str, Path], *, is_model: bool = True) -> str:
    directory = bundled.get(path, Path(path).expanduser())
    remedy = f"{CHECKPOINT} such as Qwen/Qwen3-0.6B"
    try:
        directory = resolve_checkpoint(str(directory))
    except ValueError as error:
        raise ValueError(f"{key}={error}; {remedy}") from error
    if is_model:
        with errors_of(f"{key}={path}"):
            read_config(directory)
    return str(directory.absolute())


def _file(key: str, path: str, wanted: str) -> str:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{key}={path}: no such file; give {wanted}")
    return str(file.absolute())


@dataclass(frozen=True, slots=True)
class _DrafterPaths:
    """Resolves the paths of a drafter's record."""

    target: str
    stretch: int
    pipeline: str
    file = staticmethod(_file)

    @property
    def target_layers(self) -> int:
        return read_config(Path(self.target)).num_layers + self.stretch

    def checkpoint(self, key: str, path: str, *, is_model: bool = True) -> str:
        bundled = {"pocket": pocket.DRAFTER, "pocket-deep": pocket.DEEP_DRAFTER}
        if not is_model:
            bundled = {"pocket": pocket.SPECULATOR}
        return _checkpoint(key, path, bundled, is_model=is_model)


_PROMPT_FILE = "a JSONL file with a `prompt` or `turns` field, or a folder of such files"
_WORKLOADS = ("editing", "agent", "summarisation", "structured_query", "meaning")
"""Bundled workloads beside completion, each in a file of its name."""


def workload_prompts(prompts: str, workload: str) -> Path:
    """The file of a workload: in the folder `prompts`, else the bundled one. ValueError, one line, if there is none."""
    folder = Path(prompts).expanduser()
    bundled = {"completion": pocket.PROMPTS} | {name: pocket.PROMPTS.with_name(f"{name}.jsonl") for name in _WORKLOADS}
    sets = bundled
    if prompts and folder.is_dir():
        from cluster.io.prompts import prompt_sets  # for prompts of the user's own

        if not (sets := prompt_sets(folder)):
            raise ValueError(f"job.prompts={prompts}: a folder without NAME.jsonl; give {_PROMPT_FILE}")
    if workload not in sets:
        raise ValueError(f"job.workload={workload}: is unknown; choose one of {', '.join(sets)}")
    return sets[workload].absolute()


def _prompts(job: PromptsJobConfig) -> str:
    """The file of prompts; the folder of the files if `job.workloads` names several."""
    path = Path(job.prompts).expanduser()
    named = job.workloads if isinstance(job, BenchConfig) else []
    if job.prompts and not path.is_dir():
        names = (PromptsJobConfig().workload, path.stem, path.parent.name)  # the file may have been found already
        if job.workload not in names:
            raise ValueError(f"job.workload={job.workload}: names no set of a single file; drop it or job.prompts")
        if named:
            raise ValueError(f"job.workloads={named}: names no sets of a single file; drop it or job.prompts")
        return _prompt_file(job.prompts)
    if not named:
        return str(workload_prompts(job.prompts, job.workload))
    for workload in named:
        workload_prompts(job.prompts, workload)
    return str(path.absolute()) if job.prompts else ""


def _prompt_file(path: str) -> str:
    return _file("job.prompts", path, _PROMPT_FILE)
