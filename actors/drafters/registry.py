"""The families of drafters: one file each, and the one list of them. Adding a family means adding a row here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from actors.drafters.cascade.child import ChildLevel, ChildPort, LocalChild
from actors.drafters.cascade.draft_lengths import FixedLengths, LengthControl
from actors.drafters.cascade.level import CascadeDrafter
from actors.drafters.draft_ahead.drafter import AheadDrafter
from actors.drafters.draft_ahead.tree import AHEAD
from actors.drafters.interface import Drafter
from actors.drafters.lookup.corpus import read_corpus
from actors.drafters.lookup.maxgram import MaxgramDrafter
from actors.drafters.lookup.ngram import NgramDrafter
from actors.drafters.lookup.suffix import SuffixDrafter
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.loading import open_draft_model
from actors.options import DrafterConfig, SchedulerConfig, VerifyConfig
from actors.topology import CascadeDrafterConfig, LevelLengths
from parallel.comm.group import Group


def build_drafter(
    config: DrafterConfig,
    verify: VerifyConfig,
    pipeline: str,
    scheduler: SchedulerConfig,
    group: Group,
    device: str,
    eos_token_ids: Sequence[int],
) -> tuple[Drafter, dict[str, object]]:
    """The drafter the user chose, on this rank, and the facts it reports."""
    return DRAFTERS[config.name](config, verify, pipeline, scheduler, group, device, eos_token_ids)


def _ngram(config, verify, pipeline, scheduler, group, device, eos_token_ids):
    return NgramDrafter(config), {}


def _suffix(config, verify, pipeline, scheduler, group, device, eos_token_ids):
    corpus = read_corpus(Path(config.corpus), Path(config.tokenizer)) if config.corpus else ()
    drafter = SuffixDrafter(config, corpus)
    return drafter, drafter.facts()


def _maxgram(config, verify, pipeline, scheduler, group, device, eos_token_ids):
    return MaxgramDrafter(config), {}


def _model(config, verify, pipeline, scheduler, group, device, eos_token_ids):
    runner, facts = open_draft_model(config, scheduler, group, device, pipeline)
    options = {
        "rule": verify.rule,
        "law_size": verify.law_size,
        "eos_token_ids": eos_token_ids,
        "prefill_chunk": scheduler.prefill_chunk,
    }
    if pipeline in AHEAD:
        return AheadDrafter(runner, config, policy=pipeline, **options), facts
    return ModelDrafter(runner, config, **options), facts


def _cascade(config, verify, pipeline, scheduler, group, device, eos_token_ids):
    return build_levels(
        config, range(len(config.levels)), verify, pipeline, scheduler, group, device, eos_token_ids, None
    )


def build_levels(
    config: CascadeDrafterConfig,
    levels: range,
    verify: VerifyConfig,
    pipeline: str,
    scheduler: SchedulerConfig,
    group: Group,
    device: str,
    eos_token_ids: Sequence[int],
    beneath: ChildPort | None,
) -> tuple[Drafter, dict[str, object]]:
    """These levels of a cascade in this process, over the port to the level `beneath` them, if there is one.

    Only the last of them, which others listen to, works ahead.
    """
    facts: dict[str, object] = {"weight_bytes": 0, "kv_bytes": 0}
    lengths = _lengths(config, group, device)
    most = [one.num_draft_tokens + config.tail(level) for level, one in enumerate(config.levels)]
    drafter: Drafter | None = None
    for level in levels:
        model, is_last = config.levels[level], level == levels[-1]
        if level == 0:
            inner = pipeline if is_last else "sync"
            drafter, held = build_drafter(model, verify, inner, scheduler, group, device, eos_token_ids)
        else:
            runner, held = open_draft_model(model, scheduler, group, device)
            port, below = (LocalChild(drafter) if drafter is not None else beneath), config.levels[level - 1]
            drafter = CascadeDrafter(
                runner,
                ChildLevel(port, level_name(level - 1, below), max(most[:level])),
                level=level,
                name=level_name(level, model),
                rule=verify.rule,
                law_size=verify.law_size,
                eos_token_ids=eos_token_ids,
                prefill_chunk=scheduler.prefill_chunk,
                lengths=lengths,
                tail=config.tail(level),
                merge=config.merge if level == len(config.levels) - 1 else 0,
                is_last=level == len(config.levels) - 1,
                works_ahead=pipeline in AHEAD and is_last,
            )
        summed = {name: facts[name] + held.get(name, 0) for name in ("weight_bytes", "kv_bytes")}
        facts = {**facts, **held, **summed}
    return drafter, facts


def _lengths(config: CascadeDrafterConfig, group: Group, device: str) -> FixedLengths | LengthControl:
    """One for all levels; where they are chosen, ranks of a group go by the first one's clock."""
    handed = [one.num_draft_tokens + config.tail(level) for level, one in enumerate(config.levels[:-1])]
    bounds = (*handed, config.num_draft_tokens if config.levels[-1].num_draft_tokens else 0)
    if config.lengths is LevelLengths.fixed:
        return FixedLengths(bounds)

    def agree(lengths: tuple[int, ...]) -> tuple[int, ...]:
        if group.size == 1:
            return lengths
        return tuple(group.broadcast(torch.tensor(lengths, device=device)).tolist())

    names = [level_name(level, one) for level, one in enumerate(config.levels)]
    bounds = tuple(min(bound, config.num_draft_tokens) for bound in bounds)
    return LengthControl(names, bounds, drafts_at_once=not hasattr(config.levels[0], "path"), agree=agree)


def level_name(level: int, config: DrafterConfig) -> str:
    """How reports call a level of a cascade."""
    return f"{level}-{config.name}"


DRAFTERS = {"ngram": _ngram, "maxgram": _maxgram, "suffix": _suffix, "model": _model, "cascade": _cascade}
