"""What a learner keeps in a file between two sessions: its counters, and the adapters that it trains and averages.

The file comes from a disk, so all of it is held against what a learner of this model writes. Knows no training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallel.training.adapted import Adapter
from parallel.typed_json import as_type, parse_json
from parallel.whole_files import replaced_whole

_Count = Annotated[int, Meta(ge=0, lt=2**53)]
_PARTS = ("up", "down")


@dataclass(frozen=True, slots=True)
class SavedCounts:
    """`model` is the fingerprint of the shipped model and the adapters' shape."""

    model: str
    serves: bool
    num_averaged: _Count
    num_steps: _Count
    num_positions: _Count
    num_rollbacks: _Count


def write_state(path: Path, counts: SavedCounts, **adapters: Sequence[Adapter]) -> None:
    """Writes each list of adapters under its name; a reader finds the old file or the new one."""
    tensors = {
        f"{kind}.{i}.{part}": tensor.detach().cpu().contiguous()
        for kind, pairs in adapters.items()
        for i, pair in enumerate(pairs)
        for part, tensor in zip(_PARTS, pair, strict=True)
    }
    with replaced_whole(path) as partial:
        save_file(tensors, partial, {"online": json.dumps(asdict(counts))})


def read_state(path: Path, model: str, **like: Sequence[Adapter]) -> tuple[SavedCounts, dict[str, list[Adapter]]]:
    """The counters, and adapters of the names and shapes of `like`; ValueError, one line, if it is none of `model`."""
    wrong, remedy = f"drafter.online_state={path}: ", "name a new file or delete it"
    try:
        with safe_open(path, framework="pt") as file:
            counts = as_type(parse_json((file.metadata() or {}).get("online", "{}")), SavedCounts)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except Exception as error:
        raise ValueError(f"{wrong}is not a saved state ({error}); {remedy}") from error
    if counts.model != model:
        raise ValueError(f"{wrong}was learned for another model; {remedy}")
    try:
        return counts, {kind: _adapters(tensors, kind, pairs) for kind, pairs in like.items()}
    except ValueError as error:
        raise ValueError(f"{wrong}is not a saved state ({error}); {remedy}") from None


def _adapters(tensors: Mapping[str, Tensor], kind: str, like: Sequence[Adapter]) -> list[Adapter]:
    names = [f"{kind}.{i}" for i in range(len(like))]
    return [
        (_tensor(tensors, f"{name}.up", up), _tensor(tensors, f"{name}.down", down))
        for name, (up, down) in zip(names, like, strict=True)
    ]


def _tensor(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    found = tensors.get(name)
    if found is None:
        raise ValueError(f"has no tensor {name}")
    if (found.shape, found.dtype) != (like.shape, like.dtype):
        wanted = f"{like.dtype} {list(like.shape)}"
        raise ValueError(f"tensor {name} is {found.dtype} {list(found.shape)} instead of {wanted}")
    if not torch.isfinite(found).all():
        raise ValueError(f"tensor {name} has entries that are not finite")
    return found.to(like.device)
