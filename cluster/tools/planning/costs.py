"""The costs that predictions use: seconds of a pass by role and ranks, seconds of a message, acceptance.

A file may describe a cluster other than this one; a plan that measured writes its costs in the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.tools.planning.layouts import Shape
from cluster.tools.simulation import PassCost, power_law
from parallel.whole_files import write_text


@dataclass(frozen=True, slots=True)
class RankCores:
    """CPU cores of each rank of a role; 0 where that does not matter."""

    target: int = 0
    draft: int = 0


@dataclass(frozen=True, slots=True)
class TargetCost:
    """Passes of the target on so many ranks."""

    ranks: int
    passes: PassCost
    cores: int = 0
    """CPU cores of each rank; 0 fits any."""
    beside: bool | None = None
    """Measured while the drafter computed too (true) or not (false); None fits both."""
    shape: Shape | None = None
    """Of the drafter it was measured with; None: measured alone, which fits any."""


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Passes of the draft model in one shape."""

    shape: Shape
    passes: PassCost
    exact: PassCost | None = None
    """Passes over committed text, where they differ from the others: layer-parallel ones calibrate the KV."""
    acceptance: tuple[float, ...] = ()
    """By distance from the committed text; empty: that of the cluster."""
    cores: int = 0
    beside: bool | None = None
    target_ranks: int = 0
    """Of the target it was measured with; 0 fits any."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """The inputs of a prediction. Times in seconds; `link_s` is one way."""

    num_devices: int
    target: tuple[TargetCost, ...]
    drafter: tuple[DraftCost, ...]
    link_s: float = 0.0
    coordinator_s: float = 0.0
    acceptance: tuple[float, ...] = (0.8,)
    runners_up: tuple[float, ...] = field(default_factory=lambda: power_law(1.0))

    def of_target(self, ranks: int, shape: Shape | None, cores: int, *, beside: bool) -> TargetCost | None:
        """Measured with this drafter if there is such a cost, else alone; None if unknown."""
        fitting = [cost for cost in self.target if cost.ranks == ranks and _fits(cost, cores, beside)]
        return next((cost for wanted in (shape, None) for cost in fitting if cost.shape == wanted), None)

    def of_drafter(self, shape: Shape, target_ranks: int, cores: int, *, beside: bool) -> DraftCost | None:
        """None if unknown."""
        fitting = [cost for cost in self.drafter if cost.shape == shape and _fits(cost, cores, beside)]
        return next((cost for cost in fitting if cost.target_ranks in (0, target_ranks)), None)


def _fits(cost: TargetCost | DraftCost, cores: int, beside: bool) -> bool:
    return (not cost.cores or not cores or cost.cores == cores) and cost.beside in (None, beside)


_LARGEST = 1e12
"""Of every number in a file."""
_SHOWN = 60
"""Characters of a wrong value in an error line."""
_SHAPE_KEYS = ("parallel", "ranks", "layer_group", "mlp", "partition", "threads")
_TARGET_KEYS = ("ranks", "pass_ms", "cores", "beside", "with")
_DRAFT_KEYS = ("target_ranks", "pass_ms", "exact_ms", "acceptance", "cores", "beside")
_FILE_KEYS = ("devices", "link_ms", "coordinator_ms", "acceptance", "runners_up", "target", "drafter")
_FIELDS = {
    "pass_ms": "passes",
    "exact_ms": "exact",
    "with": "shape",
    "devices": "num_devices",
    "link_ms": "link_s",
    "coordinator_ms": "coordinator_s",
}
"""Keys of a file whose fields have other names."""


def write_costs(path: Path, costs: PassCosts) -> None:
    content = {
        "devices": costs.num_devices,
        "link_ms": costs.link_s * 1e3,
        "coordinator_ms": costs.coordinator_s * 1e3,
        "acceptance": list(costs.acceptance),
        "runners_up": list(costs.runners_up),
        "target": [_entry(cost, _TARGET_KEYS) for cost in costs.target],
        "drafter": [_plain(cost.shape) | _entry(cost, _DRAFT_KEYS) for cost in costs.drafter],
    }
    write_text(path, yaml.safe_dump(content, sort_keys=False, default_flow_style=None))


def _entry(record: TargetCost | DraftCost | Shape, keys: Sequence[str]) -> dict[str, Any]:
    """The keys of a record in the file; a value that was not measured is left out."""
    values = {key: getattr(record, _FIELDS.get(key, key)) for key in keys}
    return {key: _plain(value) for key, value in values.items() if value or value is False}


def _plain(value: Any) -> Any:
    """A value of a record in the types of YAML."""
    if isinstance(value, PassCost):
        return {rows: round(seconds * 1e3, 4) for rows, seconds in value.points}
    if isinstance(value, Shape):
        absent = () if value.parallel == "layer" else ("layer_group", "mlp")
        return _entry(value, [key for key in _SHAPE_KEYS if key not in absent])
    return list(value) if isinstance(value, tuple) else value


def read_costs(path: Path) -> PassCosts:
    """Raises ValueError with one line that names the wrong entry."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # a date or a number that is none is a ValueError
        line = str(error).strip().splitlines()[0]
        raise ValueError(f"job.costs={path}: is no YAML ({line}); see docs/planning.md") from error
    except RecursionError:
        raise ValueError(f"job.costs={path}: is nested too deeply; see docs/planning.md") from None
    except OSError as error:
        raise ValueError(f"job.costs={path}: cannot be read ({error.strerror}); see docs/planning.md") from error
    try:
        fields: dict[str, Any] = {"target": (), "drafter": ()} | _read(content, "", _FILE_KEYS)
        if not fields["target"]:
            raise ValueError("target: names no pass; give a list of {ranks: 1, pass_ms: {1: 10.0}}")
        ranks = [cost.ranks for cost in fields["target"]] + [cost.shape.ranks for cost in fields["drafter"]]
        return PassCosts(**{"num_devices": max(ranks)} | fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"job.costs={path}: {error}; see docs/planning.md") from error


def _read(entry: Any, where: str, keys: Sequence[str]) -> dict[str, Any]:
    """Field -> value of the `keys` that an entry has; `pass_ms` is required."""
    name = where or "the file"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{name}: must be a mapping of keys to values")
    if unknown := [_shown(key) for key in entry if key not in keys]:
        raise ValueError(f"{name} has the unknown key {unknown[0]}; choose from {', '.join(keys)}")
    return {
        _FIELDS.get(key, key): _READERS[key](entry.get(key), f"{where}.{key}".removeprefix("."))
        for key in keys
        if key == "pass_ms" or entry.get(key) is not None
    }


def _target_cost(entry: Any, where: str) -> TargetCost:
    fields: dict[str, Any] = {"ranks": 1} | _read(entry, where, _TARGET_KEYS)
    return TargetCost(**fields)


def _draft_cost(entry: Any, where: str) -> DraftCost:
    fields = _read(entry, where, _SHAPE_KEYS + _DRAFT_KEYS)
    return DraftCost(_shape_of({key: fields.pop(key) for key in _SHAPE_KEYS if key in fields}), **fields)


def _shape(entry: Any, where: str) -> Shape:
    return _shape_of(_read(entry, where, _SHAPE_KEYS))


def _shape_of(fields: dict[str, Any]) -> Shape:
    parallel = "single" if fields.get("ranks", 1) == 1 else "tensor"
    return Shape(**{"parallel": parallel, "layer_group": max(fields.get("partition", ()), default=1)} | fields)


def _need(good: bool, where: str, rule: str, value: Any) -> None:
    if not good:
        raise ValueError(f"{where}: must be {rule}, not {_shown(value)}")


def _shown(value: Any) -> str:
    """The beginning of a value of the file, in one line."""
    return " ".join(str(value).split())[:_SHOWN]


def _number(value: Any, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _need(is_number and value >= 0, where, "a number of 0 or above", value)
    _need(value <= _LARGEST, where, f"at most {_LARGEST:g}", value)
    return float(value)


def _seconds(value: Any, where: str) -> float:
    return _number(value, where) / 1e3


def _whole(value: Any, where: str) -> int:
    return int(_number(value, where))


def _count(value: Any, where: str) -> int:
    number = _number(value, where)
    _need(number >= 1 and number == int(number), where, "a whole number of at least 1", value)
    return int(number)


def _probabilities(value: Any, where: str) -> tuple[float, ...]:
    numbers = tuple(_number(number, where) for number in (value if isinstance(value, list) else [value]))
    _need(bool(numbers) and max(numbers) <= 1, where, "numbers from 0 to 1", value)
    return numbers


def _runners_up(value: Any, where: str) -> tuple[float, ...]:
    return _probabilities(value, where) if isinstance(value, list) else power_law(_number(value, where))


def _passes(value: Any, where: str) -> PassCost:
    """Milliseconds by rows; a single number is the cost of any number of rows."""
    if not isinstance(value, Mapping):
        return PassCost.flat(_seconds(value, where))
    return PassCost.table({_count(rows, where): _seconds(ms, where) for rows, ms in value.items()})


def _flag(value: Any, where: str) -> bool:
    _need(isinstance(value, bool), where, "true or false", value)
    return value


def _one_of(*choices: str) -> Callable[[Any, str], str]:
    def read(value: Any, where: str) -> str:
        _need(value in choices, where, f"{', '.join(choices[:-1])} or {choices[-1]}", value)
        return value

    return read


def _list_of(what: str, read: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple[Any, ...]]:
    def read_all(value: Any, where: str) -> tuple[Any, ...]:
        _need(isinstance(value, list), where, f"a list of {what}", value)
        return tuple(read(entry, f"{where}[{i}]") for i, entry in enumerate(value))

    return read_all


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "parallel": _one_of("single", "tensor", "layer"),
    "ranks": _count,
    "layer_group": _count,
    "mlp": _one_of("replicated", "tensor"),
    "partition": _list_of("sizes", _count),
    "threads": _whole,
    "pass_ms": _passes,
    "exact_ms": _passes,
    "cores": _whole,
    "beside": _flag,
    "with": _shape,
    "target_ranks": _whole,
    "devices": _count,
    "link_ms": _seconds,
    "coordinator_ms": _seconds,
    "acceptance": _probabilities,
    "runners_up": _runners_up,
    "target": _list_of("mappings", _target_cost),
    "drafter": _list_of("mappings", _draft_cost),
}
"""Key -> from its value, and where it stands in the file, to the value of the field; raises ValueError."""
