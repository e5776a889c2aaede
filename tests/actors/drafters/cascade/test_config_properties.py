"""Random cascades: what is refused is named as it stands in the record, and every rule is reached."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths, LevelsPlacement
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.options import INDEPENDENT_ONLY, PipelineName, VerifyRule
from actors.protocol.messages import SamplingKind
from actors.verification.compatibility import DraftTrait
from tests.actors.drafters.model.test_config_properties import AHEAD, refused

LOOKUP, MODEL = NgramDrafterConfig(), ModelDrafterConfig(path="x")


def random_cascade(draw):
    def level(first):
        chosen = LOOKUP if draw.random() < (0.5 if first else 0.1) else MODEL
        if chosen is MODEL and draw.random() < 0.2:
            chosen = replace(MODEL, strategy=draw.choice([Strategy.tree, Strategy.tree, Strategy.best_first]))
            chosen = replace(chosen, branching=[2, 1]) if draw.random() < 0.1 and chosen.strategy == "tree" else chosen
        if chosen is MODEL and draw.random() < 0.2:
            chosen = replace(MODEL, device="cpu")
        return replace(chosen, num_draft_tokens=draw.choice([0, 3, 3, 3]))

    count = draw.randrange(2, 4)
    return CascadeDrafterConfig(
        levels=[level(i == 0) for i in range(count)],
        tails=draw.choice([[], [], [draw.choice([0, 0, 0, 1]), *(draw.randrange(2) for _ in range(count - 1))]]),
        lengths=draw.choice(list(LevelLengths)),
        merge=draw.choice([0, 0, 2]),
        placement=draw.choice(list(LevelsPlacement)),
    )


def broken_rules(config, rule, pipeline):
    """Keys that some rule forbids, without the order in which they are looked at."""
    levels, tails, first = config.levels, any(config.tails), config.levels[0]
    broken = set()
    for i, level in enumerate(levels[1:], 1):
        broken |= {f"levels[{i}]"} if level.name != "model" else set()
        if level.name == "model" and (level.strategy == "best_first" or (level.strategy == "tree" and config.tail(i))):
            broken.add(f"levels[{i}].strategy")
        if level.name == "model" and level.branching:
            broken.add(f"levels[{i}].branching")
    broken |= {"tails[0]"} if config.tails and config.tails[0] else set()
    if config.placement == "together":
        last = levels[-1].device if levels[-1].name == "model" else None
        for i, level in enumerate(levels[:-1]):
            if level.name == "model" and level.device not in ("auto", last):
                broken.add(f"levels[{i}]")
    trees = [level.name == "model" and level.strategy == "tree" for level in levels[1:]]
    if config.merge and (rule != "coupled" or trees[-1]):
        broken.add("merge")
    if rule in INDEPENDENT_ONLY and tails:
        broken.add("tails")
    passes_lookup = rule in INDEPENDENT_ONLY and first.name != "model"
    is_auto, added = config.lengths == "auto", tails or config.merge
    in_turn = pipeline in (PipelineName.sync, PipelineName.plain)
    if is_auto and (config.placement == "separate" or not in_turn or added or passes_lookup or any(trees)):
        broken.add("lengths")
    for i, level in enumerate(levels):
        if level.num_draft_tokens == 0:
            is_last_ahead = i == len(levels) - 1 and pipeline in AHEAD
            if is_last_ahead or i == 0 or is_auto or added or passes_lookup:
                broken.add(f"levels[{i}].num_draft_tokens")
    return broken


def value_of(config, key):
    """What the record holds under a key of an error line."""
    value = config
    for name, index in re.findall(r"(\w+)(?:\[(\d+)\])?", key):
        value = getattr(value, name)
        value = value[int(index)] if index else value
    return value.name if hasattr(value, "name") and not isinstance(value, str) else value


def test_a_refused_cascade_breaks_the_rule_that_is_named_and_others_break_none():
    draw, named = random.Random(0), Counter()
    for _ in range(800):
        config, rule, pipeline = random_cascade(draw), draw.choice(list(VerifyRule)), draw.choice(list(PipelineName))
        broken = broken_rules(config, rule, pipeline)
        found = refused(config.check, "draft") or refused(config.check_with, rule, pipeline, "draft")
        if found is None:
            assert not broken
            continue
        key = found[0].removeprefix("draft.")
        assert key in broken and found[1] == str(value_of(config, key))
        named[re.sub(r"\d", "i", key)] += 1
    reached = {
        "levels[i]",
        "levels[i].strategy",
        "levels[i].branching",
        "tails[i]",
        "merge",
        "tails",
        "lengths",
        "levels[i].num_draft_tokens",
    }
    assert set(named) == reached


def test_trees_that_reach_the_target_are_named():
    tree = replace(MODEL, strategy=Strategy.tree)
    for levels, kind, branches in (
        ([LOOKUP, tree], SamplingKind.WITHOUT_REPLACEMENT, True),
        ([LOOKUP, tree, MODEL], SamplingKind.IID, False),  # the last level verifies it
        ([LOOKUP, tree, replace(MODEL, num_draft_tokens=0)], SamplingKind.WITHOUT_REPLACEMENT, True),
    ):
        config = CascadeDrafterConfig(levels=levels)
        assert kind in config.sampling_kinds(VerifyRule.rejection, PipelineName.sync)
        for rule in INDEPENDENT_ONLY:
            assert config.sampling_kinds(rule, PipelineName.sync) == {SamplingKind.IID}
        assert config.draft_traits == ({DraftTrait.BRANCHES} if branches else set())


def test_tokens_of_the_first_level_may_reach_the_target():
    for lengths, tails, second, forwards in (
        (LevelLengths.fixed, [], 3, False),
        (LevelLengths.auto, [], 3, True),
        (LevelLengths.fixed, [0, 2], 3, True),
        (LevelLengths.fixed, [0, 0], 3, False),
        (LevelLengths.fixed, [], 0, True),
    ):
        levels = [LOOKUP, replace(MODEL, num_draft_tokens=second)]
        config = CascadeDrafterConfig(levels=levels, lengths=lengths, tails=tails)
        kinds = config.sampling_kinds(VerifyRule.rejection, PipelineName.sync)
        assert kinds == {SamplingKind.IID} | ({SamplingKind.DETERMINISTIC} if forwards else set())
    apart = CascadeDrafterConfig(levels=[MODEL, MODEL], tails=[0, 1], placement=LevelsPlacement.separate)
    together = replace(apart, placement=LevelsPlacement.together)
    kinds = {one: one.first_kinds(VerifyRule.rejection, PipelineName.pearl) for one in (apart, together)}
    assert kinds == {apart: {SamplingKind.DETERMINISTIC}, together: {SamplingKind.WITHOUT_REPLACEMENT}}
