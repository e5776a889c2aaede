"""What each role will hold in memory, from its checkpoint's shapes alone: told before a weight is read.

An estimate of what the ranks decide for themselves (`parallel/runtime/kv_sizing.py`): the KV pool shrinks where memory is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import DrafterConfig
from actors.drafters.model.config import Parallel
from actors.topology import level_roles
from cluster.config.schema import LaunchConfig
from cluster.placement.ranks import RankPlacement
from parallel.model.families.registry import read_config
from parallel.runtime.model_bytes import ITEM_BYTES, dtype_name, kv_bytes_per_slot, weight_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes over all ranks of a role; `kv` is the most its pool will take."""

    weights: int
    kv: int


def footprints(config: LaunchConfig, places: Sequence[RankPlacement]) -> dict[str, Footprint]:
    """Role -> its footprint; a role without a model is left out."""
    found = {}
    for place in places:
        if place.role in found:
            continue
        models = [config.target] if place.role == "target" else _draft_models(config, place.role)
        weights = kv = 0
        for model in models:
            shapes = read_config(model.path).stretched(getattr(model, "stretch", 0))
            dtype = dtype_name(model.dtype, place.device)
            width, packed = ITEM_BYTES[dtype], place.device == "cpu" and dtype == "float32"
            length = min(getattr(model, "max_model_len", 0) or shapes.max_positions, shapes.max_positions)
            num_slots = getattr(model, "kv_slots", 0) or config.scheduler.max_num_seqs * length
            # Ranks that divide layers instead of tensors hold at most all of them.
            parts = 1 if getattr(model, "parallel", None) == Parallel.layer else place.size
            weights += place.size * weight_bytes(shapes, parts, width, packed=packed)
            kv += place.size * num_slots * kv_bytes_per_slot(shapes, parts, width)
        if weights:
            found[place.role] = Footprint(weights, kv)
    return found


def _draft_models(config: LaunchConfig, role: str) -> list[DrafterConfig]:
    """What this part of the drafter loads."""
    drafter = config.drafter
    parts = drafter.levels if isinstance(drafter, CascadeDrafterConfig) else [drafter]
    return [parts[i] for i in level_roles(drafter)[role] if getattr(parts[i], "path", "")]


def describe_layout(places: Sequence[RankPlacement], sizes: dict[str, Footprint]) -> str:
    """The layout and what it takes, a line each."""
    lines = ["layout", *(f"  {place.describe()}" for place in places), "memory"]
    for role, size in sizes.items():
        lines.append(f"  {role}: {mebibytes(size.weights)} of weights, up to {mebibytes(size.kv)} of KV")
    return "\n".join(lines if sizes else lines[:-1])


def mebibytes(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
