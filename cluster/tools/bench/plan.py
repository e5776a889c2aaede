"""The settings of a bench: every combination of the job's axes, checked before anything starts.

Knows the configuration and neither engines nor clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths
from actors.drafters.config import DrafterConfig, PlacedDrafterConfig, Placement
from actors.drafters.model.config import ModelDrafterConfig, PassDrafterConfig, Strategy
from actors.drafters.registry import DRAFTERS
from actors.drafters.self_speculation.config import Search, SelfDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import Parallel, PipelineConfig, PipelineName
from cluster import pocket
from cluster.config.compose import checked, drafter_record, with_chosen_rule
from cluster.config.jobs import BenchConfig
from cluster.config.schema import CHOICES, LaunchConfig

_BUNDLED = {str(pocket.DRAFTER): "model", str(pocket.DEEP_DRAFTER): "pocket-deep"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One combination. `context` 0 leaves the prompts as they are; `workload` is empty for `job.prompts`."""

    drafter: DrafterConfig
    pipeline: PipelineConfig
    temperature: float
    batch: int
    context: int
    workload: str = ""

    @property
    def num_draft_tokens(self) -> int:
        return self.drafter.num_draft_tokens

    @property
    def is_adaptive(self) -> bool:
        return self.pipeline.adaptive and self.pipeline.name.drafts and self.num_draft_tokens > 0

    @property
    def engine_key(self) -> str:
        """Settings with the same key run on one engine."""
        return f"{self.drafter} {self.pipeline}"  # configurations may hold lists, which are no keys

    def configure(self, config: LaunchConfig) -> LaunchConfig:
        """`config` with this setting's drafter, pipeline and temperature; the rule auto becomes the one for these."""
        sampling = replace(config.sampling, temperature=self.temperature)
        return with_chosen_rule(replace(config, drafter=self.drafter, pipeline=self.pipeline, sampling=sampling))

    def labels(self) -> dict[str, object]:
        """Its values, by the names of the command line."""
        return {
            "drafter": self.drafter.name,
            "num_draft_tokens": self.num_draft_tokens,
            "parallel": str(self.drafter.parallel if isinstance(self.drafter, ModelDrafterConfig) else Parallel.single),
            "pipeline": str(self.pipeline.name),
            "adaptive": self.is_adaptive,
            "temperature": self.temperature,
            "batch": self.batch,
            "context": self.context or None,
            "workload": self.workload or None,
        }


def expand(config: LaunchConfig) -> list[Setting]:
    """All settings in the order of the axes, without repetitions. ValueError, one line, for one that cannot be run."""
    job: BenchConfig = config.job
    _check_axes(config)
    drafters = [_drafter(entry, config.drafter) for entry in job.drafters] or [config.drafter]
    for name in job.pipelines:
        _known("pipeline", name)
    pipelines = [replace(config.pipeline, name=PipelineName(name)) for name in job.pipelines] or [config.pipeline]
    if job.draft_lengths:  # an adaptive length could not be compared
        pipelines = [replace(pipeline, adaptive=False, min_draft_tokens=0) for pipeline in pipelines]
    combinations = product(
        [
            drafter
            for choice in drafters
            for shared in _with_parallels(choice, job.parallels)
            for drafter in _with_lengths(shared, job.draft_lengths)
        ],
        pipelines,
        job.temperatures or [config.sampling.temperature],
        job.batches or [1],
        job.contexts or [0],
        job.workloads or [""],
    )
    settings = {str(setting): setting for setting in (Setting(*combination) for combination in combinations)}
    # With real paths, checked as configurations of their own.
    return [replace(setting, drafter=checked(setting.configure(config)).drafter) for setting in settings.values()]


def setting_names(settings: Sequence[Setting]) -> list[str]:
    """A short name for each: drafter and draft length, then the values that differ between settings."""
    by_path = len({path for setting in settings for path in setting.drafter.models()}) > 1
    labels = [{**setting.labels(), "drafter": _title(setting.drafter, by_path=by_path)} for setting in settings]
    differing = {key for key in labels[0] if len({label[key] for label in labels}) > 1}
    return [_name(label, differing) for label in labels]


def _name(label: dict[str, object], differing: set[str]) -> str:
    sign = "<=" if label["adaptive"] else "="
    parts = [f"{label['drafter']}" + f" k{sign}{label['num_draft_tokens']}" * bool(label["num_draft_tokens"])]
    prefixes = {"parallel": "", "pipeline": "", "temperature": "T=", "batch": "b=", "context": "c=", "workload": ""}
    parts += [f"{prefix}{label[key]}" for key, prefix in prefixes.items() if key in differing]
    return " ".join(parts)


def _title(drafter: DrafterConfig, *, by_path: bool) -> str:
    """Its family, or those of its levels; models by their checkpoints where there are several, speculators always."""
    if isinstance(drafter, PlacedDrafterConfig) and drafter.placement is not Placement.auto:
        return f"{_title(replace(drafter, placement=Placement.auto), by_path=by_path)} {drafter.placement}"
    if isinstance(drafter, CascadeDrafterConfig):
        levels = "+".join(_title(level, by_path=by_path) for level in drafter.levels)
        return f"{levels} auto" if drafter.lengths is LevelLengths.auto else levels
    if isinstance(drafter, AutoDrafterConfig):
        return f"auto({', '.join(_title(one, by_path=by_path) for one in drafter.drafters)})"
    if not isinstance(drafter, PassDrafterConfig):
        return drafter.name
    title = drafter.name
    if isinstance(drafter, SpeculatorDrafterConfig):
        title = _checkpoint_name(drafter.path)
    elif isinstance(drafter, SelfDrafterConfig):
        title = f"{title} {_layers_name(drafter)}".rstrip()
    elif by_path and isinstance(drafter, ModelDrafterConfig):
        return _BUNDLED.get(drafter.path, _checkpoint_name(drafter.path))
    return title if drafter.strategy is Strategy.chain else f"{title} {drafter.strategy}"


def _checkpoint_name(path: str) -> str:
    """`job=train` writes every drafter into the folder `drafter` of a run."""
    folder = Path(path)
    return folder.parent.name if folder.name == "drafter" else folder.name


def _layers_name(drafter: SelfDrafterConfig) -> str:
    """Which layers of the target draft."""
    chosen = [f"exit={drafter.exit}"] if drafter.exit else []
    if drafter.layers:
        chosen.append(Path(drafter.layers).stem)
    elif drafter.skip:
        chosen.append(f"skip={'+'.join(map(str, drafter.skip))}")
    return " ".join(chosen if drafter.search is Search.none else [*chosen, drafter.search])


def _drafter(entry: Any, configured: DrafterConfig) -> DrafterConfig:
    """A choice by its name (as configured if it is the chosen one), by its keys, or by the levels of a cascade."""
    keys = {"name": "cascade", "levels": entry} if isinstance(entry, list) else entry
    if not isinstance(keys, dict):
        return configured if keys == configured.name else _known("drafter", keys)
    if keys.get("name") not in DRAFTERS:
        raise ValueError(f"job.drafters={keys}: has no known name; choose from {', '.join(DRAFTERS)}")
    return drafter_record(keys, "job.drafters")


def _known(group: str, choice: str) -> Any:
    if choice not in CHOICES[group]:
        raise ValueError(f"job.{group}s={choice}: no such choice; choose from {', '.join(CHOICES[group])}")
    return CHOICES[group][choice]


def _with_parallels(drafter: DrafterConfig, parallels: Sequence[str]) -> list[DrafterConfig]:
    """A draft model in each of these ways of sharing: `single` by one rank, the others by the configured ranks."""
    if not parallels or not isinstance(drafter, ModelDrafterConfig):
        return [drafter]
    for name in parallels:
        if name not in tuple(Parallel):
            raise ValueError(f"job.parallels={name}: no such way; choose from {', '.join(Parallel)}")
    whole = replace(drafter, layer_group=0, layer_partition=[])
    shared = {
        Parallel.single: replace(whole, parallel=Parallel.single, ranks=1),
        Parallel.tensor: replace(whole, parallel=Parallel.tensor),
        Parallel.layer: replace(drafter, parallel=Parallel.layer),
    }
    return [shared[Parallel(name)] for name in parallels]


def _with_lengths(drafter: DrafterConfig, lengths: Sequence[int]) -> list[DrafterConfig]:
    if not lengths or not drafter.num_draft_tokens:
        return [drafter]
    return [replace(drafter, num_draft_tokens=length) for length in lengths]


def _check_axes(config: LaunchConfig) -> None:
    job = config.job
    widest = max(job.batches, default=1)
    if widest > config.scheduler.max_num_seqs:
        raise ValueError(
            f"job.batches={widest}: only {config.scheduler.max_num_seqs} sequences run at a time; "
            f"add scheduler.max_num_seqs={widest}"
        )
