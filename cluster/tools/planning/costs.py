"""What a plan rests on: seconds of a pass by role and ranks, hops, acceptance; read from a file or measured.

A file describes a cluster that may not be here; a plan that measured writes its costs in the same form, so they can be
planned with again. It must not know how costs are measured or used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from cluster.tools.planning.layouts import Shape
from cluster.tools.simulation import PassCost, power_law


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
    """Of the drafter it was measured with; None: by itself, which stands for any."""


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
    """Of the target it was measured with; 0 stands for any."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything a prediction needs. Times in seconds; `link_s` is one way."""

    num_devices: int
    target: tuple[TargetCost, ...]
    drafter: tuple[DraftCost, ...]
    link_s: float = 0.0
    coordinator_s: float = 0.0
    acceptance: tuple[float, ...] = (0.8,)
    runners_up: tuple[float, ...] = field(default_factory=lambda: power_law(1.0))

    def of_target(self, ranks: int, shape: Shape | None, cores: int, *, beside: bool) -> TargetCost | None:
        """Measured with this drafter, if it was; None where nobody knows."""
        fitting = [cost for cost in self.target if cost.ranks == ranks and _fits(cost, cores, beside)]
        close = [cost for cost in fitting if cost.shape == shape] or [cost for cost in fitting if cost.shape is None]
        return close[0] if close else None

    def of_drafter(self, shape: Shape, target_ranks: int, cores: int, *, beside: bool) -> DraftCost | None:
        fitting = [cost for cost in self.drafter if cost.shape == shape and _fits(cost, cores, beside)]
        return next((cost for cost in fitting if cost.target_ranks in (0, target_ranks)), None)


def _fits(cost: TargetCost | DraftCost, cores: int, beside: bool) -> bool:
    return (not cost.cores or not cores or cost.cores == cores) and cost.beside in (None, beside)


def read_costs(path: Path) -> Costs:
    """ValueError, one line, naming the entry that makes no sense."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = str(error).strip().splitlines()[0]
        raise ValueError(f"job.costs={path}: is no YAML ({line}); see docs/planning.md") from error
    try:
        return _costs(_mapping(content, "the file"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"job.costs={path}: {error}; see docs/planning.md") from error


def write_costs(path: Path, costs: Costs) -> None:
    content = {
        "devices": costs.num_devices,
        "link_ms": costs.link_s * 1e3,
        "coordinator_ms": costs.coordinator_s * 1e3,
        "acceptance": list(costs.acceptance),
        "runners_up": list(costs.runners_up),
        "target": [_target_entry(cost) for cost in costs.target],
        "drafter": [_draft_entry(cost) for cost in costs.drafter],
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False, default_flow_style=None), encoding="utf-8")


def _target_entry(cost: TargetCost) -> dict[str, object]:
    entry = {"ranks": cost.ranks, "pass_ms": _ms(cost.passes), **_where(cost)}
    return entry | ({"with": _shape_entry(cost.shape)} if cost.shape else {})


def _shape_entry(shape: Shape) -> dict[str, object]:
    entry: dict[str, object] = {"parallel": str(shape.parallel), "ranks": shape.ranks}
    if shape.parallel == "layer":
        entry |= {"layer_group": shape.layer_group, "mlp": shape.mlp}
    entry |= {"partition": list(shape.partition)} if shape.partition else {}
    return entry | ({"threads": shape.threads} if shape.threads else {})


def _draft_entry(cost: DraftCost) -> dict[str, object]:
    entry = _shape_entry(cost.shape)
    entry |= {"target_ranks": cost.target_ranks} if cost.target_ranks else {}
    entry |= {"pass_ms": _ms(cost.passes)}
    entry |= {"exact_ms": _ms(cost.exact)} if cost.exact is not None else {}
    entry |= {"acceptance": list(cost.acceptance)} if cost.acceptance else {}
    return entry | _where(cost)


def _ms(passes: PassCost) -> dict[int, float]:
    return {rows: round(seconds * 1e3, 4) for rows, seconds in passes.points}


def _where(cost: TargetCost | DraftCost) -> dict[str, object]:
    return ({"cores": cost.cores} if cost.cores else {}) | ({} if cost.beside is None else {"beside": cost.beside})


def _costs(content: Mapping[str, object]) -> Costs:
    _refuse_unknown(content, "the file", KEYS)
    target = [_target_cost(entry, f"target[{i}]") for i, entry in enumerate(_entries(content, "target"))]
    drafter = [_draft_cost(entry, f"drafter[{i}]") for i, entry in enumerate(_entries(content, "drafter"))]
    if not target:
        raise ValueError("target: names no pass; give a list of {ranks: 1, pass_ms: {1: 10.0}}")
    ranks = [cost.ranks for cost in target] + [cost.shape.ranks for cost in drafter]
    runners_up = content.get("runners_up", 1.0)
    return Costs(
        num_devices=_count(content.get("devices", max(ranks)), "devices"),
        target=tuple(target),
        drafter=tuple(drafter),
        link_s=_seconds(content.get("link_ms", 0.0), "link_ms"),
        coordinator_s=_seconds(content.get("coordinator_ms", 0.0), "coordinator_ms"),
        acceptance=_probabilities(content.get("acceptance", [0.8]), "acceptance"),
        runners_up=(
            _probabilities(runners_up, "runners_up")
            if isinstance(runners_up, Sequence)
            else power_law(_number(runners_up, "runners_up"))
        ),
    )


KEYS = ("devices", "link_ms", "coordinator_ms", "acceptance", "runners_up", "target", "drafter")
PASS_KEYS = ("ranks", "pass_ms", "cores", "beside")
SHAPE_KEYS = ("parallel", "ranks", "layer_group", "mlp", "partition", "threads")
TARGET_KEYS = (*PASS_KEYS, "with")
DRAFT_KEYS = (*SHAPE_KEYS, *PASS_KEYS, "exact_ms", "acceptance", "target_ranks")


def _target_cost(entry: Mapping[str, object], where: str) -> TargetCost:
    _refuse_unknown(entry, where, TARGET_KEYS)
    company = entry.get("with")
    if company is not None:
        _refuse_unknown(_mapping(company, f"{where}.with"), f"{where}.with", SHAPE_KEYS)
    return TargetCost(
        _count(entry.get("ranks", 1), f"{where}.ranks"),
        _passes(entry.get("pass_ms"), f"{where}.pass_ms"),
        *_place(entry, where),
        None if company is None else _shape(company, f"{where}.with"),
    )


def _draft_cost(entry: Mapping[str, object], where: str) -> DraftCost:
    _refuse_unknown(entry, where, DRAFT_KEYS)
    acceptance, exact = entry.get("acceptance"), entry.get("exact_ms")
    return DraftCost(
        _shape(entry, where),
        _passes(entry.get("pass_ms"), f"{where}.pass_ms"),
        None if exact is None else _passes(exact, f"{where}.exact_ms"),
        () if acceptance is None else _probabilities(acceptance, f"{where}.acceptance"),
        *_place(entry, where),
        int(_number(entry.get("target_ranks", 0), f"{where}.target_ranks")),
    )


def _shape(entry: Mapping[str, object], where: str) -> Shape:
    ranks = _count(entry.get("ranks", 1), f"{where}.ranks")
    parallel = entry.get("parallel", "single" if ranks == 1 else "tensor")
    if parallel not in ("single", "tensor", "layer"):
        raise ValueError(f"{where}.parallel: must be single, tensor or layer, not {parallel}")
    mlp = entry.get("mlp", "replicated")
    if mlp not in ("replicated", "tensor"):
        raise ValueError(f"{where}.mlp: must be replicated or tensor, not {mlp}")
    partition = entry.get("partition", [])
    if not isinstance(partition, list):
        raise ValueError(f"{where}.partition: must be a list of sizes, not {partition}")
    sizes = tuple(_count(size, f"{where}.partition") for size in partition)
    width = _count(entry.get("layer_group", max(sizes, default=1)), f"{where}.layer_group")
    return Shape(parallel, ranks, width, mlp, sizes, int(_number(entry.get("threads", 0), f"{where}.threads")))


def _place(entry: Mapping[str, object], where: str) -> tuple[int, bool | None]:
    beside = entry.get("beside")
    if beside not in (None, True, False):
        raise ValueError(f"{where}.beside: must be true or false, not {beside}")
    return int(_number(entry.get("cores", 0), f"{where}.cores")), beside


def _entries(content: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    entries = content.get(key, [])
    if not isinstance(entries, list):
        raise ValueError(f"{key}: must be a list of mappings")
    return [_mapping(entry, f"{key}[{i}]") for i, entry in enumerate(entries)]


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: must be a mapping of keys to values")
    return value


def _refuse_unknown(entry: Mapping[str, object], where: str, known: Sequence[str]) -> None:
    for key in entry:
        if key not in known:
            raise ValueError(f"{where} has the unknown key {key}; choose from {', '.join(known)}")


def _passes(value: object, where: str) -> PassCost:
    """Milliseconds by rows; a single number costs the same for any number of rows."""
    if not isinstance(value, Mapping):
        return PassCost.flat(_seconds(value, where))
    return PassCost.table({_count(rows, where): _seconds(ms, where) for rows, ms in value.items()})


def _seconds(value: object, where: str) -> float:
    return _number(value, where) / 1e3


def _probabilities(value: object, where: str) -> tuple[float, ...]:
    numbers = tuple(_number(one, where) for one in (value if isinstance(value, list | tuple) else [value]))
    if not numbers or any(number > 1 for number in numbers):
        raise ValueError(f"{where}: must be numbers from 0 to 1, not {value}")
    return numbers


def _count(value: object, where: str) -> int:
    number = _number(value, where)
    if number < 1 or number != int(number):
        raise ValueError(f"{where}: must be a whole number of at least 1, not {value}")
    return int(number)


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{where}: must be a number of 0 or above, not {value}")
    return float(value)
