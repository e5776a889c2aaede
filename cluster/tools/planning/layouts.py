"""Enumerates the layouts to predict: ranks of each role, how they share the drafter, placement and pipeline.

Pure: numbers of ranks -> layouts; a layout -> overrides of the command line, or a configuration. Knows no costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.drafters.config import NoDrafterConfig, Placement
from actors.drafters.model.config import Calibration, MlpParallel, ModelDrafterConfig
from actors.drafters.model.layer_partition import layer_partition
from actors.options import Parallel, PipelineName
from cluster.config.jobs import PlanConfig
from cluster.config.schema import LaunchConfig, PlacementConfig, PlacementName
from parallel.model.config import DecoderConfig
from parallel.model.families.registry import read_config
from parallel.model.partition import default_partition

FEWEST_LAYERS = 3
"""The first and the last layer run alone: with so few layers none run side by side."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """How the ranks of a draft model share it."""

    parallel: str = "single"
    ranks: int = 1
    layer_group: int = 1
    mlp: str = "replicated"
    """MLPs of layer-parallel ranks: replicated or tensor."""
    partition: tuple[int, ...] = ()
    """Sizes of the hyper-layers; empty where only their width is known."""
    threads: int = 0
    """Threads of a rank, at most; 0: as in the drafter's options."""

    @property
    def has_own_partition(self) -> bool:
        """Whether its hyper-layers differ from those that the engine derives from the width."""
        return bool(self.partition) and self.partition != default_sizes(sum(self.partition), self.layer_group)

    def describe(self) -> str:
        if self.parallel == "single":
            return f"single, {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else "single"
        if self.parallel == "tensor":
            return f"tensor {self.ranks}"
        width = "+".join(map(str, self.partition)) if self.has_own_partition else f"N={self.layer_group}"
        return f"layer {self.ranks} {width} mlp {self.mlp}"


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to use the devices; `shape` is None without a drafter."""

    target_ranks: int
    pipeline: str
    placement: str
    """separate, colocated, or attached: the draft model on the target's ranks."""
    shape: Shape | None = None

    @property
    def overlaps(self) -> bool:
        """Whether both roles compute at the same time."""
        order = PipelineName(self.pipeline)
        return order.works_ahead or order.alternates

    def describe(self) -> str:
        if self.shape is None:
            return f"plain, target on {self.target_ranks}"
        return f"{self.pipeline}, target on {self.target_ranks}, drafter {self.shape.describe()}, {self.placement}"

    def overrides(self, num_draft_tokens: int) -> list[str]:
        """Arguments of `python -m cluster.launch`."""
        if self.shape is None:
            return ["drafter=none", "pipeline=plain", f"target.tp={self.target_ranks}"]
        options = self._drafter_options(self.shape, num_draft_tokens)
        words = [
            "drafter=model",
            f"pipeline={self.pipeline}",
            f"placement={self._devices}",
            f"target.tp={self.target_ranks}",
        ]
        return words + [f"drafter.{name}={value}".replace(", ", ",") for name, value in options.items()]

    def with_own_ranks(self) -> Layout:
        """The same with ranks of the drafter on the target's devices where it would be on the target's ranks."""
        return replace(self, placement="colocated") if self.placement == "attached" else self

    def configure(self, config: LaunchConfig, num_draft_tokens: int) -> LaunchConfig:
        """`config` in this layout."""
        target = replace(config.target, tp=self.target_ranks)
        pipeline = replace(config.pipeline, name=PipelineName(self.pipeline))
        if self.shape is None:
            return replace(config, target=target, drafter=NoDrafterConfig(), pipeline=pipeline)
        options = {"layer_group": 0, "layer_partition": []} | self._drafter_options(self.shape, num_draft_tokens)
        drafter = replace(draft_model(config), **options)
        placement = PlacementConfig(self._devices)
        return replace(config, target=target, drafter=drafter, pipeline=pipeline, placement=placement)

    @property
    def _devices(self) -> PlacementName:
        """`placement` of the command line: that of roles."""
        return PlacementName.colocated if self.placement == "colocated" else PlacementName.separate

    def _drafter_options(self, shape: Shape, num_draft_tokens: int) -> dict[str, Any]:
        if self.placement == "attached":  # split as the target is
            options: dict[str, Any] = {"placement": Placement.attached, "parallel": Parallel.single, "ranks": 1}
            return options | {"num_draft_tokens": num_draft_tokens}
        options = {"placement": Placement.separate, "parallel": Parallel(shape.parallel), "ranks": shape.ranks}
        if shape.threads:
            options["num_threads"] = shape.threads
        if shape.parallel == Parallel.layer:
            own = shape.has_own_partition
            options |= {"layer_partition": list(shape.partition)} if own else {"layer_group": shape.layer_group}
            options["mlp_parallel"] = MlpParallel(shape.mlp)
        return options | {"num_draft_tokens": num_draft_tokens}


def draft_model(config: LaunchConfig) -> ModelDrafterConfig:
    """The drafter's options: only a draft model is planned for."""
    assert isinstance(config.drafter, ModelDrafterConfig)
    return config.drafter


def enumerate_layouts(
    target_ranks: Iterable[int], shapes: Sequence[Shape], num_devices: int, pipelines: Sequence[str], batch: int
) -> Iterator[Layout]:
    """Every layout that fits the devices. Colocated roles gain nothing from overlap, and a drafter that is shared as
    the target is would gain nothing from ranks of its own there; ping-pong needs two requests."""
    for ranks in target_ranks:
        if ranks > num_devices:
            continue
        yield Layout(ranks, "plain", "separate")
        for shape in shapes:
            if "sync" in pipelines and shape.ranks <= num_devices:
                as_target = shape.parallel != "layer" and shape.ranks == ranks
                yield Layout(ranks, "sync", "attached" if as_target else "colocated", shape)
            if ranks + shape.ranks > num_devices:
                continue
            for pipeline in pipelines:
                if pipeline != "pingpong" or batch > 1:
                    yield Layout(ranks, pipeline, "separate", shape)


def described_layouts(
    target_ranks: Sequence[int], shapes: Sequence[Shape], num_devices: int, job: PlanConfig
) -> list[Layout]:
    """Layouts of the passes that a file describes, within the job's axes."""
    ranks = [ranks for ranks in dict.fromkeys(target_ranks) if ranks in (job.target_ranks or [ranks])]
    wanted = [shape for shape in dict.fromkeys(shapes) if shape.parallel in job.parallels]
    wanted = [shape for shape in wanted if shape.ranks in (job.draft_ranks or [shape.ranks])]
    return list(enumerate_layouts(ranks, wanted, num_devices, job.pipelines, job.batch))


def local_layouts(config: LaunchConfig, num_devices: int, *, threads: bool = False) -> list[Layout]:
    """Layouts that the models allow on so many devices, within the job's axes; `threads`: devices are cores, and a
    drafter may also use only one of several."""
    job: PlanConfig = config.job
    sizes = [1 << i for i in range(num_devices.bit_length())]
    target = read_config(Path(config.target.path))
    options = draft_model(config)
    drafter = read_config(Path(options.path))
    ranks = [size for size in job.target_ranks or sizes if _divides(target, size)]
    widths = _partitions(options, drafter, job.layer_groups) if "layer" in job.parallels else {}
    splits_mlps = options.calibration is not Calibration.broadcast  # one rank needs whole MLPs
    shapes = [Shape()] * ("single" in job.parallels)
    for size in (size for size in job.draft_ranks or sizes if size > 1):
        divides = _divides(drafter, size)
        shapes += [Shape("tensor", size)] * ("tensor" in job.parallels and divides)
        mlps = ["replicated"] + ["tensor"] * (divides and splits_mlps)
        fitting = [(width, partition) for partition, width in widths.items() if max(partition) <= size]
        shapes += [Shape("layer", size, width, mlp, partition) for width, partition in fitting for mlp in mlps]
    layouts = list(enumerate_layouts(ranks, shapes, num_devices, job.pipelines, job.batch))
    if threads:
        single = [layout.with_own_ranks() for layout in layouts if layout.shape == Shape()]
        sharing = [(layout, 1 if layout.placement == "colocated" else layout.target_ranks + 1) for layout in single]
        layouts += [replace(layout, shape=Shape(threads=1)) for layout, ranks in sharing if num_devices // ranks > 1]
    return layouts


def _partitions(
    config: ModelDrafterConfig, model: DecoderConfig, widths: Iterable[int]
) -> Mapping[tuple[int, ...], int]:
    """Partition -> width: the user's partition, or the engine's for each width, each once."""
    if config.layer_partition:
        sizes = tuple(map(len, layer_partition(replace(config, ranks=1), model)))
        return {sizes: max(sizes)} if max(sizes) > 1 else {}
    partitions: dict[tuple[int, ...], int] = {}
    for width in widths:
        if width > 1 and model.num_layers > FEWEST_LAYERS:
            partitions.setdefault(default_sizes(model.num_layers, width), width)
    return partitions


def default_sizes(num_layers: int, width: int) -> tuple[int, ...]:
    """Sizes of the engine's own hyper-layers."""
    return tuple(map(len, default_partition(num_layers, width)))


def simplest(layouts: Iterable[Layout]) -> Layout:
    """The synchronous layout with the fewest ranks, separate rather than on the same devices, and the drafter on ranks
    of its own, so that a probe measures what messages between the roles take."""
    synchronous = ((layout, layout.shape) for layout in layouts if layout.pipeline == "sync" and layout.shape)
    order = min(synchronous, key=lambda pair: (pair[0].target_ranks, pair[1].ranks, pair[0].placement != "separate"))
    return order[0].with_own_ranks()


def _divides(config: DecoderConfig, ranks: int) -> bool:
    try:
        config.check_ranks(ranks)
    except ValueError:
        return False
    return True
