"""Bytes that each role will hold, from its checkpoint's shapes alone, before weights are loaded.

An upper estimate of what the ranks decide (`parallel/runtime/kv_sizing.py`): the KV pool shrinks where memory is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.options import Parallel, TargetConfig
from cluster import pocket
from cluster.config.schema import LaunchConfig
from cluster.placement.ranks import RankPlacement, models_of
from parallel.model.families.registry import read_config
from parallel.runtime.model_bytes import model_memory

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from actors.drafters.speculator.config import SpeculatorDrafterConfig
    from cluster.placement.ranks import DraftModel

    _Model = TargetConfig | DraftModel

_TRANSLATED = ", whose tokenizer is not the target's: "
LOAD_RATE = 0.5 * 2**30
"""Bytes a second that weights are read at, at the least: a network file system's."""
_HOW = {
    "auto": "it drafts the tokens that both have",
    "intersection": "it drafts the tokens that both have",
    "strings": "its text is encoded in the target's tokens",
}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes over all ranks of a role; `kv` is an upper bound of its pool."""

    weights: int
    kv: int


def footprints(config: LaunchConfig, places: Sequence[RankPlacement]) -> dict[str, Footprint]:
    """Role -> its footprint; a role without a model is left out."""
    found: dict[str, Footprint] = {}
    for place in places:
        if place.role not in found:
            sizes = [_footprint(model, place, config) for model in _models(config, place.role)]
            if sizes:
                found[place.role] = Footprint(sum(size.weights for size in sizes), sum(size.kv for size in sizes))
    return found


def _footprint(model: _Model, place: RankPlacement, config: LaunchConfig) -> Footprint:
    """The footprint of one model on the `place.size` ranks of its role."""
    if isinstance(model, TargetConfig):
        return _target_footprint(model, place, config)
    if _is_speculator(model):
        return _speculator_footprint(model, place, config)
    # A rank that divides layers instead of tensors holds at most all of them.
    weights, per_slot = model.memory(1 if model.parallel == Parallel.layer else place.size, place.device)
    longest = model.most_rows(config.scheduler, read_config(model.path).max_positions)
    slots = model.kv_slots or config.scheduler.max_num_seqs * longest
    return Footprint(place.size * weights, place.size * slots * per_slot)


def _target_footprint(target: TargetConfig, place: RankPlacement, config: LaunchConfig) -> Footprint:
    shapes = read_config(target.path).stretched(target.stretch)
    types = target.dtype, target.weights, target.kv_dtype
    weights, per_slot = model_memory(shapes, target.path, place.size, place.device, types)
    length = min(target.max_model_len or shapes.max_positions, shapes.max_positions)
    slots = target.kv_slots or config.scheduler.max_num_seqs * length
    return Footprint(place.size * weights, place.size * slots * per_slot)


def _speculator_footprint(model: SpeculatorDrafterConfig, place: RankPlacement, config: LaunchConfig) -> Footprint:
    """What it holds, with copies of the target's embedding and head where it is not on the target's ranks."""
    target, memory = config.target, model.memory(config.target, place.size, place.device)
    length = min(memory.max_positions, target.max_model_len or memory.max_positions)
    slots, tables = model.kv_slots or config.scheduler.max_num_seqs * length, 0
    if place.role == "target":
        slots = model.kv_slots or target.kv_slots or slots
    else:
        tables = model.table_bytes(target, place.size, place.device)
    return Footprint(place.size * (tables + memory.weight_bytes), place.size * slots * memory.bytes_per_slot)


def _models(config: LaunchConfig, role: str) -> Sequence[_Model]:
    """The models of this role."""
    return [config.target] * (role == "target") + models_of(config, role)


def sharing(config: LaunchConfig, places: Sequence[RankPlacement], place: RankPlacement) -> tuple[int, float]:
    """Bytes of the weights of the other ranks on the GPU of `place`, and its part of what all their weights leave: by
    the KV that each could use. (0, 1.0) for a rank that has its device alone, or that is on a CPU."""
    together = [one for one in places if one.device_key == place.device_key]
    if place.kind == "cpu" or len(together) == 1:
        return 0, 1.0
    sizes = footprints(config, together)
    beside = [sizes[one.role] for one in together if one.role in sizes]
    if place.role not in sizes:
        return 0, 1.0
    own, ranks = sizes[place.role], {one.role: one.size for one in together}
    weights = sum(sizes[role].weights // size for role, size in ranks.items() if role in sizes and role != place.role)
    most = sum(one.kv for one in beside)
    return weights, own.kv / most if most else 1 / len(beside)


def load_allowance_s(places: Sequence[RankPlacement], sizes: dict[str, Footprint]) -> float:
    """Seconds that the rank with the most weights may take to read them."""
    return max((sizes[one.role].weights / one.size for one in places if one.role in sizes), default=0) / LOAD_RATE


def describe_layout(config: LaunchConfig, places: Sequence[RankPlacement], sizes: dict[str, Footprint]) -> str:
    """A line for each rank, one for a drafter without ranks, and one for the memory and checkpoints of each role."""
    lines = ["layout", *(f"  {place.describe()}" for place in places)]
    if config.drafter.is_attached(config.pipeline.name):
        lines.append(f"  drafter {', '.join(config.drafter.member_names)}: on the target's ranks, between its passes")
    lines.append("memory")
    for role, size in sizes.items():
        checkpoints = ", ".join(pocket.described(model.path) + _translation(model) for model in _models(config, role))
        held = f"{mebibytes(size.weights)} of weights, up to {mebibytes(size.kv)} of KV"
        lines.append(f"  {role}: {held}, {checkpoints}")
    return "\n".join(lines if sizes else lines[:-1])


def _translation(model: _Model) -> str:
    if isinstance(model, TargetConfig) or _is_speculator(model) or not model.tokenizer:
        return ""
    return _TRANSLATED + _HOW[model.translate]


def _is_speculator(model: DraftModel) -> TypeIs[SpeculatorDrafterConfig]:
    return bool(model.speculators())


def mebibytes(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
