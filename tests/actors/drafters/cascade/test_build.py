"""What the levels of a cascade are built of: every key of its record reaches the level that it is about."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.drafters.adjacency.config import RecyclingDrafterConfig
from actors.drafters.cascade import build
from actors.drafters.cascade.child import LocalChild
from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths
from actors.drafters.cascade.draft_lengths import LengthControl, PassedLengths
from actors.drafters.cascade.level import LevelSpec
from actors.drafters.config import DraftSetup
from actors.drafters.interface import Capabilities
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.options import SchedulerConfig, VerifyConfig
from parallel.comm.group import SINGLE, Group

NGRAM, RECYCLING = NgramDrafterConfig(num_draft_tokens=3), RecyclingDrafterConfig(num_draft_tokens=6, width=4)
SMALL, LARGE = (ModelDrafterConfig(path=path, num_draft_tokens=length) for path, length in (("small", 4), ("large", 5)))
SETUP = DraftSetup(VerifyConfig(law_size=9), "branches", SchedulerConfig(prefill_chunk=77), SINGLE, "cpu", (1,))


@pytest.fixture
def built(monkeypatch):
    """What levels are made of, and the pipelines that first levels are built for."""
    seen: Any = SimpleNamespace(levels=[], opened=[], pipelines=[])

    class Level:
        capabilities = Capabilities()

        def __init__(self, runner, child, spec, options, lengths):
            seen.levels.append(SimpleNamespace(runner=runner, child=child, spec=spec, options=options, lengths=lengths))

    def open_draft_model(*arguments, agreed_slots):
        seen.opened.append((*arguments, agreed_slots))
        return len(seen.opened), {"weight_bytes": 10, "kv_bytes": 1, f"of_{len(seen.opened)}": True}

    monkeypatch.setattr(build, "CascadeDrafter", Level)
    monkeypatch.setattr(build, "open_draft_model", open_draft_model)
    model = SimpleNamespace(capabilities=Capabilities())
    monkeypatch.setattr(ModelDrafterConfig, "build", lambda one, setup: (model, {}))
    for record in (NgramDrafterConfig, RecyclingDrafterConfig):
        real = record.build
        monkeypatch.setattr(
            record, "build", lambda one, setup, real=real: seen.pipelines.append(setup.pipeline) or real(one, setup)
        )
    return seen


def test_tails_and_bounds_are_those_of_the_record(built):
    config = CascadeDrafterConfig(levels=(NGRAM, SMALL, LARGE), tails=(0, 1, 2), num_draft_tokens=10, merge=3)
    drafter, facts = build.build_levels(config, range(3), SETUP, None)
    low, top = built.levels
    assert low.spec == LevelSpec(1, "1-model", tail=1, is_last=False)
    assert top.spec == LevelSpec(2, "2-model", tail=2, merge=3, works_ahead=True)
    assert (low.child.name, low.child.num_draft_tokens) == ("0-ngram", 3)
    assert (top.child.name, top.child.num_draft_tokens) == ("1-model", 5), "four tokens and a tail"
    assert (low.runner, top.runner) == (1, 2) and isinstance(drafter, build.CascadeDrafter)
    assert built.opened == [(model, SETUP.scheduler, SINGLE, "cpu", 0) for model in (SMALL, LARGE)]
    assert low.lengths is top.lengths and low.lengths.lengths == (3, 5, 10) and built.pipelines == ["sync"]
    assert (low.options.law_size, low.options.prefill_chunk) == (9, 77)
    assert (facts["weight_bytes"], facts["kv_bytes"], facts["of_1"], facts["of_2"]) == (20, 2, True, True)


@pytest.mark.parametrize(("pipeline", "works_ahead"), [("sync", False), ("pearl", True), ("tree", True)])
def test_only_the_last_level_works_ahead_and_the_first_learns(built, pipeline, works_ahead):
    tree = replace(SMALL, strategy=Strategy.tree, width=2)
    config = CascadeDrafterConfig(levels=(RECYCLING, tree, LARGE), num_draft_tokens=5)
    build.build_levels(config, range(3), replace(SETUP, pipeline=pipeline), None)
    low, top = built.levels
    assert low.spec == LevelSpec(1, "1-model", width=2, is_last=False, child_top_k=4, child_width=config.width(0))
    assert top.spec == LevelSpec(2, "2-model", child_width=2, works_ahead=works_ahead)


def test_a_first_level_alone_is_built_for_the_pipeline(built):
    config = CascadeDrafterConfig(levels=(NGRAM, SMALL), num_draft_tokens=4)
    build.build_levels(config, range(1), SETUP, None)
    assert built.pipelines == ["branches"] and not built.levels


def test_a_level_over_ranks_of_its_own_has_the_port_to_them(built):
    config = CascadeDrafterConfig(levels=(SMALL, LARGE), num_draft_tokens=4)
    port: Any = LocalChild(SimpleNamespace(capabilities=Capabilities()))
    build.build_levels(config, range(1, 2), SETUP, port)
    (level,) = built.levels
    assert level.child._port is port and level.spec.is_last


class Pair(Group):
    """A group of two, of which the other decided."""

    rank, size = 1, 2

    def broadcast(self, tensor, src=0):
        return tensor.fill_(1)


@pytest.mark.parametrize(("last", "lengths"), [(5, (3, 4, 6)), (0, (3, 4, 0))])
def test_fixed_lengths_are_those_of_the_levels(built, last, lengths):
    config = CascadeDrafterConfig(levels=(NGRAM, SMALL, replace(LARGE, num_draft_tokens=last)), num_draft_tokens=6)
    build.build_levels(config, range(3), SETUP, None)
    assert type(built.levels[0].lengths) is PassedLengths and built.levels[0].lengths.lengths == lengths


@pytest.mark.parametrize(("first", "at_once"), [(NGRAM, True), (SMALL, False)])
@pytest.mark.parametrize(("group", "agreed"), [(SINGLE, (2, 3)), (Pair(), (1, 1))])
def test_chosen_lengths_are_within_the_records_and_those_of_rank_0(built, first, at_once, group, agreed):
    levels = replace(first, num_draft_tokens=9), LARGE
    config = CascadeDrafterConfig(levels=levels, num_draft_tokens=6, lengths=LevelLengths.auto)
    build.build_levels(config, range(2), replace(SETUP, group=group), None)
    control = built.levels[0].lengths
    assert isinstance(control, LengthControl) and control.bounds == (6, 6)
    assert control.drafts_at_once == at_once and control.names[1] == "1-model"
    assert control.agree((2, 3)) == agreed
