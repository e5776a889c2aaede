"""The levels of `drafter=cascade`: from names and keys in the configuration to typed records, and what is refused.

It must not know how a level drafts, nor where Hydra's words come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any, get_origin, get_type_hints

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import DrafterConfig
from cluster.config.errors import unknown_key


def with_typed_levels(drafter: CascadeDrafterConfig, families: Mapping[str, type]) -> CascadeDrafterConfig:
    """Every level as its family's record, and the draft length as a number; ValueError, one line, otherwise."""
    levels = [typed_level(entry, f"drafter.levels[{i}]", families) for i, entry in enumerate(drafter.levels)]
    if len(levels) < 2:
        raise ValueError(f"drafter.levels={drafter.levels}: must be at least two, the cheapest first, as [ngram,model]")
    if drafter.tails and len(drafter.tails) != len(levels):
        raise ValueError(f"drafter.tails={drafter.tails}: give one for each of the {len(levels)} levels, or none")
    last = next((level.num_draft_tokens for level in reversed(levels) if level.num_draft_tokens), 0)
    length = drafter.num_draft_tokens or last + drafter.tail(len(levels) - 1) + drafter.merge
    return replace(drafter, levels=tuple(levels), tails=tuple(drafter.tails), num_draft_tokens=length)


def typed_level(entry: Any, where: str, families: Mapping[str, type]) -> DrafterConfig:
    if isinstance(entry, DrafterConfig):
        return entry
    keys = {"name": entry} if isinstance(entry, str) else entry
    known = [name for name in families if name not in ("none", "cascade")]
    if not isinstance(keys, dict) or keys.get("name") not in known:
        raise ValueError(f"{where}={entry}: is no level; give a name or {{name: NAME, ...}}, one of {', '.join(known)}")
    return typed_record(keys, where, families[keys["name"]])


def typed_record(keys: Mapping[str, Any], where: str, record: type) -> DrafterConfig:
    """A drafter's record from its keys."""
    hints = get_type_hints(record)
    for key in keys:
        if key not in hints:
            raise ValueError(unknown_key(where, str(key), [item.name for item in fields(record)]))
    return record(**{key: _value(value, hints[key], f"{where}.{key}") for key, value in keys.items()})


def _value(value: Any, wanted: type, where: str) -> Any:
    wanted = get_origin(wanted) or wanted
    if issubclass(wanted, StrEnum):
        if value not in list(wanted):
            raise ValueError(f"{where}={value}: is unknown; choose one of {', '.join(wanted)}")
        return wanted(value)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise ValueError(f"{where}={value}: must be of type {wanted.__name__}")
    return value
