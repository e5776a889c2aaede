"""Builds the levels of a cascade that one rank runs, from its record."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from actors.drafters.cascade.child import ChildLevel, ChildPort, LocalChild
from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths
from actors.drafters.cascade.draft_lengths import LengthControl, PassedLengths
from actors.drafters.cascade.level import CascadeDrafter, LevelSpec
from actors.drafters.cascade.remote_child import RemoteChild
from actors.drafters.config import PARTS, DraftSetup, measured_facts
from actors.drafters.interface import Drafter
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.model.loading import open_draft_model
from actors.drafters.self_speculation.config import SelfDrafterConfig
from actors.drafters.self_speculation.drafter import open_self_draft
from actors.options import PipelineName
from parallel.comm.group import Group


def build_cascade(config: CascadeDrafterConfig, setup: DraftSetup) -> tuple[Drafter, dict[str, object]]:
    """The levels that this rank's role runs, over those of the role below it if there is one."""
    levels = config.roles()[setup.role]
    if levels[0] == 0:
        return build_levels(config, levels, setup, None)
    assert setup.mailbox is not None, "a role above another reads its drafts from a mailbox"
    return build_levels(config, levels, setup, RemoteChild(setup.mailbox, setup.group, setup.device))


def build_levels(
    config: CascadeDrafterConfig, levels: range, setup: DraftSetup, child: ChildPort | None
) -> tuple[Drafter, dict[str, object]]:
    """These levels of a cascade, over the port to the level before them if there is one; the facts sum up their bytes.

    Only the last of them, which answers to another role, works ahead.
    """
    facts: dict[str, object] = {}
    parts = dict[str, dict[str, object]]()
    weight_bytes = kv_bytes = 0
    lengths = _lengths(config, setup.group, setup.device)
    most = [one.num_draft_tokens + config.tail(level) for level, one in enumerate(config.levels)]
    drafter: Drafter | None = None
    held: dict[str, Any]
    for level in levels:
        model, is_last = config.levels[level], level == levels[-1]
        if level == 0:
            drafter, held = model.build(setup if is_last else replace(setup, pipeline="sync"))
        else:
            on_target = isinstance(model, SelfDrafterConfig)
            if on_target:
                runner, held = open_self_draft(model, setup, resumes=False), {}
            else:
                given = setup.scheduler, setup.group, setup.device
                open_level = partial(open_draft_model, model, *given, agreed_slots=setup.agreed_slots)
                runner, held = setup.opened.next(open_level)
            port = LocalChild(drafter) if drafter is not None else child
            assert port is not None, "a cascade above level 0 has a level below it"
            top = level == len(config.levels) - 1
            spec = LevelSpec(
                level,
                config.level_name(level),
                tail=config.tail(level),
                merge=config.merge if top else 0,
                width=config.width(level),
                child_width=config.width(level - 1),
                is_last=top,
                works_ahead=PipelineName(setup.pipeline).works_ahead and is_last,
                child_top_k=config.levels[0].target_top_k if level == 1 else 0,
            )
            below = ChildLevel(port, config.level_name(level - 1), max(most[:level]))
            drafter = CascadeDrafter(runner, below, spec, setup.model_options, lengths)
        weight_bytes += held.get("weight_bytes", 0)
        kv_bytes += held.get("kv_bytes", 0)
        facts |= held
        parts[str(level)] = measured_facts(held)
    assert drafter is not None, "a role has at least one level"
    facts |= {"weight_bytes": weight_bytes, "kv_bytes": kv_bytes}
    return drafter, facts | ({PARTS: parts} if setup.group.size > 1 else {})


def _lengths(config: CascadeDrafterConfig, group: Group, device: str) -> PassedLengths:
    """One object for all levels; chosen lengths are those of rank 0, whose clock decides."""
    passed = [one.num_draft_tokens + config.tail(level) for level, one in enumerate(config.levels[:-1])]
    bounds = (*passed, config.num_draft_tokens if config.levels[-1].num_draft_tokens else 0)
    if config.lengths is LevelLengths.fixed:
        return PassedLengths(bounds)

    def agree(lengths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(group.agree(lengths, device))

    names = [config.level_name(level) for level in range(len(config.levels))]
    bounds = tuple(min(bound, config.num_draft_tokens) for bound in bounds)
    drafts_at_once = not isinstance(config.levels[0], ModelDrafterConfig)
    return LengthControl(bounds, names, drafts_at_once=drafts_at_once, agree=agree)
