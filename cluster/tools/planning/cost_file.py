"""The YAML form of pass costs, which `job.costs=` reads and a plan that measured writes: milliseconds by keys.

The records below are the form; msgspec holds a file against them, and what they leave out has a default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from msgspec import Meta, Struct, to_builtins

from cluster.io.yaml_files import read_yaml
from cluster.tools.planning.costs import DraftCost, PassCosts, TargetCost
from cluster.tools.planning.layouts import Shape
from cluster.tools.simulation import PassCost, power_law
from parallel.ranges import errors_of
from parallel.whole_files import write_text

_Number = Annotated[float, Meta(ge=0, le=1e12)]
_Whole = Annotated[int, Meta(ge=0, le=10**12)]
_Count = Annotated[int, Meta(ge=1, le=10**12)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Shares = _Share | Annotated[list[_Share], Meta(min_length=1)]
E = TypeVar("E", bound="_Entry")
_PassMs = _Number | dict[_Count, _Number]
"""Milliseconds by rows, or of any number of rows."""
_Positive = Annotated[float, Meta(gt=0, le=1e12)]


class _Entry(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One mapping of the file; fields are named as those of the record that it stands for."""


class _ShapeEntry(_Entry):
    parallel: Literal["single", "tensor", "layer"] | None = None
    ranks: _Count | None = None
    layer_group: _Count | None = None
    mlp: Literal["replicated", "tensor"] | None = None
    partition: list[_Count] = []
    threads: _Whole = 0

    def shape(self) -> Shape:
        ranks = self.ranks or 1
        parallel = self.parallel or ("single" if ranks == 1 else "tensor")
        group = self.layer_group or max(self.partition, default=1)
        return Shape(parallel, ranks, group, self.mlp or "replicated", tuple(self.partition), self.threads)


class _DraftEntry(_ShapeEntry, kw_only=True, rename={"passes": "pass_ms", "exact": "exact_ms"}):
    target_ranks: _Whole = 0
    passes: _PassMs
    exact: _PassMs | None = None
    context_ms: _Number = 0.0
    """Further milliseconds of a pass for every 1,000 rows of KV that its sequences have."""
    acceptance: _Shares = []
    cores: _Whole = 0
    beside: bool | None = None

    def cost(self) -> DraftCost:
        return DraftCost(
            self.shape(),
            PassCost.of_ms(self.passes, self.context_ms),
            exact=None if self.exact is None else PassCost.of_ms(self.exact, self.context_ms),
            acceptance=_several(self.acceptance),
            cores=self.cores,
            beside=self.beside,
            target_ranks=self.target_ranks,
        )


class _TargetEntry(_Entry, kw_only=True, rename={"passes": "pass_ms", "shape": "with"}):
    ranks: _Count | None = None
    passes: _Positive | dict[_Count, _Positive]
    context_ms: _Number = 0.0
    cores: _Whole = 0
    beside: bool | None = None
    shape: _ShapeEntry | None = None

    def cost(self) -> TargetCost:
        shape = None if self.shape is None else self.shape.shape()
        passes = PassCost.of_ms(self.passes, self.context_ms)
        return TargetCost(self.ranks or 1, passes, self.cores, self.beside, shape)


class _CostFile(_Entry):
    devices: _Count | None = None
    link_ms: _Number = 0.0
    coordinator_ms: _Number = 0.0
    acceptance: _Shares = 0.8
    runners_up: _Number | list[_Share] = 1.0
    """Probabilities by rank, or the exponent of a power law."""
    target: list[_TargetEntry] = []
    drafter: list[_DraftEntry] = []

    def costs(self) -> PassCosts:
        target, drafter = tuple(one.cost() for one in self.target), tuple(one.cost() for one in self.drafter)
        devices = self.devices or max([*(cost.ranks for cost in target), *(cost.shape.ranks for cost in drafter)])
        ranked = tuple(self.runners_up) if isinstance(self.runners_up, list) else power_law(self.runners_up)
        if sum(ranked) > 1 + 1e-9:
            raise ValueError(f"runners_up: {list(ranked)} must not sum to more than 1")
        return PassCosts(
            devices,
            target,
            drafter,
            link_s=self.link_ms / 1e3,
            coordinator_s=self.coordinator_ms / 1e3,
            acceptance=_several(self.acceptance),
            runners_up=ranked,
        )


def read_costs(path: Path) -> PassCosts:
    """Raises ValueError with one line that names the wrong entry."""
    with errors_of(f"job.costs={path}", "see docs/planning.md"):
        file = read_yaml(path, _CostFile)
        if not file.target:
            raise ValueError("target: names no pass; give a list of {ranks: 1, pass_ms: {1: 10.0}}")
        return file.costs()


def write_costs(path: Path, costs: PassCosts) -> None:
    """What was not measured is left out."""
    file = _CostFile(
        devices=costs.num_devices,
        link_ms=costs.link_s * 1e3,
        coordinator_ms=costs.coordinator_s * 1e3,
        acceptance=list(costs.acceptance),
        runners_up=list(costs.runners_up),
        target=[_entry(_TargetEntry, cost, cost.passes) for cost in costs.target],
        drafter=[_entry(_DraftEntry, cost, cost.passes, cost.shape) for cost in costs.drafter],
    )
    write_text(path, yaml.safe_dump(to_builtins(file), sort_keys=False, default_flow_style=None))


def _entry(kind: type[E], *records: object) -> E:
    """The entry with the values of these records. Only layer-parallel shapes have a width and MLPs to share."""
    values = {
        name: getattr(record, name) for record in records for name in kind.__struct_fields__ if hasattr(record, name)
    }
    if values.get("parallel", "layer") != "layer":
        values |= {"layer_group": None, "mlp": None}
    return kind(**{name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, PassCost):
        return {rows: round(seconds * 1e3, 4) for rows, seconds in value.points}
    if isinstance(value, Shape):
        return _entry(_ShapeEntry, value)
    return list(value) if isinstance(value, tuple) else value


def _several(shares: float | list[float]) -> tuple[float, ...]:
    return tuple(shares) if isinstance(shares, list) else (shares,)
