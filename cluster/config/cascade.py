"""The levels of `drafter=cascade`: from names and keys in the configuration to typed records, and what is refused.

It must not know how a level drafts, nor where Hydra's words come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any, get_origin, get_type_hints

from actors.drafters.draft_ahead.tree import AHEAD
from actors.options import DrafterConfig, ModelDrafterConfig, PipelineName, Strategy
from actors.topology import CascadeDrafterConfig, LevelLengths, LevelsPlacement
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


def cascade_rules(drafter: CascadeDrafterConfig, rule: str, pipeline: str) -> Iterator[tuple[str, object, bool, str]]:
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
    yield from _length_rules(drafter, rule, pipeline)
    coupled = rule == "coupled"
    yield "drafter.merge", drafter.merge, drafter.merge >= 0, "must be 0 (nothing is merged) or above"
    yield "drafter.merge", drafter.merge, coupled or not drafter.merge, "is exact with verify=coupled only; drop it"
    deterministic = rule == "kseq" and any(drafter.tails)
    yield "drafter.tails", drafter.tails, not deterministic, "are not drawn as verify=kseq needs; take another rule"


def _length_rules(drafter: CascadeDrafterConfig, rule: str, pipeline: str) -> Iterator[tuple[str, object, bool, str]]:
    """What chosen lengths, and a level that passes on what is beneath it, can be combined with."""
    fixed = drafter.lengths is LevelLengths.fixed
    in_turn = pipeline in (PipelineName.sync, PipelineName.plain)
    alone = not (any(drafter.tails) or drafter.merge)
    drawn = rule != "kseq" or isinstance(drafter.levels[0], ModelDrafterConfig)
    for good, otherwise in (
        (
            drafter.placement is LevelsPlacement.together,
            "needs all levels in one place; add drafter.placement=together",
        ),
        (in_turn, "needs levels and target to work in turn, to measure what each takes; use pipeline=sync"),
        (alone, "chooses among levels without tails; drop drafter.tails and drafter.merge"),
        (drawn, "may pass on a lookup, which is not drawn as verify=kseq needs; take another rule"),
    ):
        yield "drafter.lengths", drafter.lengths, fixed or good, otherwise
    last, ahead = drafter.levels[-1].num_draft_tokens, pipeline in AHEAD
    otherwise = "prepares nothing while the target verifies; leave that level out, or use pipeline=sync"
    yield f"drafter.levels[{len(drafter.levels) - 1}].num_draft_tokens", last, last > 0 or not ahead, otherwise
    for i, level in enumerate(drafter.levels):
        name, length = f"drafter.levels[{i}].num_draft_tokens", level.num_draft_tokens
        drafts = length > 0
        yield (
            name,
            length,
            drafts or (length == 0 and i > 0),
            "must be at least 1; 0 only behind the first level",
        )
        yield name, length, drafts or fixed, "is the most that drafter.lengths=auto may choose; it must be at least 1"
        yield name, length, drafts or alone, "cannot have tails; drop drafter.tails and drafter.merge"
        yield (
            name,
            length,
            drafts or drawn,
            "passes on a lookup, which is not drawn as verify=kseq needs; take another rule",
        )
