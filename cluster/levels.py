"""The levels of `drafter=cascade`: from names and keys in the configuration to typed records, and what is refused.

It must not know how a level drafts, nor where Hydra's words come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any, get_origin, get_type_hints

from actors.levels import CascadeDrafterConfig, LevelLengths, LevelsPlacement
from actors.options import DrafterConfig, ModelDrafterConfig, Strategy
from cluster.errors import unknown_key


def with_typed_levels(drafter: CascadeDrafterConfig, families: Mapping[str, type]) -> CascadeDrafterConfig:
    """Every level as its family's record, and the draft length as a number; ValueError, one line, otherwise."""
    levels = [typed_level(entry, f"drafter.levels[{i}]", families) for i, entry in enumerate(drafter.levels)]
    if len(levels) < 2:
        raise ValueError(f"drafter.levels={drafter.levels}: must be at least two, the cheapest first, as [ngram,model]")
    if drafter.tails and len(drafter.tails) != len(levels):
        raise ValueError(f"drafter.tails={drafter.tails}: give one for each of the {len(levels)} levels, or none")
    length = drafter.num_draft_tokens or levels[-1].num_draft_tokens + drafter.tail(len(levels) - 1) + drafter.merge
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


def cascade_rules(drafter: CascadeDrafterConfig, rule: str) -> Iterator[tuple[str, object, bool, str]]:
    """Field, its value, whether that is good, and what is wrong otherwise together with the remedy."""
    for i, level in enumerate(drafter.levels[1:], 1):
        yield (
            f"drafter.levels[{i}]",
            level.name,
            isinstance(level, ModelDrafterConfig),
            "only the first level may lack a model; put it there",
        )
        yield (
            f"drafter.levels[{i}].strategy",
            level.strategy,
            level.strategy is Strategy.chain,
            "a level that verifies hands up a chain; leave it at chain",
        )
    for i, tail in enumerate(drafter.tails):
        good = tail == 0 if i == 0 else tail >= 0
        yield f"drafter.tails[{i}]", tail, good, "must be 0 or above, and 0 for the first level: none is beneath it"
    for i, level in enumerate(drafter.levels[:-1]):
        if isinstance(level, ModelDrafterConfig) and drafter.placement is LevelsPlacement.together:
            alike = (level.ranks, level.device) in ((1, "auto"), (drafter.ranks, drafter.device))
            otherwise = "needs the last level's ranks and device; use drafter.placement=separate for its own"
            yield f"drafter.levels[{i}]", level.name, alike, otherwise
    together = drafter.placement is LevelsPlacement.together
    otherwise = "needs all levels in one place; add drafter.placement=together"
    yield "drafter.lengths", drafter.lengths, together or drafter.lengths is LevelLengths.fixed, otherwise
    coupled = rule == "coupled"
    yield "drafter.merge", drafter.merge, drafter.merge >= 0, "must be 0 (nothing is merged) or above"
    yield "drafter.merge", drafter.merge, coupled or not drafter.merge, "is exact with verify=coupled only; drop it"
    deterministic = rule == "kseq" and any(drafter.tails)
    yield "drafter.tails", drafter.tails, not deterministic, "are not drawn as verify=kseq needs; take another rule"
