"""What `drafter=auto` needs and says follows from its drafters, whichever of them it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.drafters.adjacency.config import AdedDrafterConfig, RecyclingDrafterConfig
from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import DrafterConfig, DraftSetup, Placement
from actors.drafters.lookup.maxgram import MaxgramDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.drafters.retrieval.config import RestDrafterConfig
from actors.options import Parallel, PipelineName, SchedulerConfig, VerifyConfig, VerifyRule
from actors.protocol.messages import SamplingKind
from actors.verification.compatibility import DraftTrait
from parallel.comm.group import SINGLE
from tests.actors.drafters.retrieval.small_store import small_store

SMALL, LARGE = ModelDrafterConfig(path="small"), ModelDrafterConfig(path="large")
LEVELS = CascadeDrafterConfig(levels=[NgramDrafterConfig(), LARGE], num_draft_tokens=5)
TREE = ModelDrafterConfig(path="small", strategy=Strategy.tree)
SYNC = PipelineName.sync


def auto(*drafters: DrafterConfig, **fields: Any) -> AutoDrafterConfig:
    return AutoDrafterConfig(drafters=list(drafters), **fields)


@pytest.mark.parametrize(
    ("drafters", "is_chain", "top_k", "reads_prompts"),
    [
        ([NgramDrafterConfig(), SMALL], True, 0, False),
        ([SMALL, SuffixDrafterConfig(width=2)], False, 0, False),
        ([TREE, NgramDrafterConfig()], False, 0, False),
        ([RecyclingDrafterConfig(width=3, reads_prompts=False), AdedDrafterConfig(width=5)], False, 5, True),
        ([NgramDrafterConfig(), RecyclingDrafterConfig(width=3, reads_prompts=False)], False, 3, False),
    ],
)
def test_it_needs_what_any_of_them_needs(drafters, is_chain, top_k, reads_prompts):
    both = auto(*drafters)
    assert (both.is_chain, both.target_top_k, both.reads_prompts) == (is_chain, top_k, reads_prompts)
    assert both.chooses_lengths


def test_its_models_are_those_of_all_drafters_and_levels():
    both = auto(SuffixDrafterConfig(), SMALL, LEVELS)
    assert both.draft_models == [SMALL, LARGE] and both.models() == ["small", "large"]
    assert auto(SuffixDrafterConfig()).draft_models == auto(SuffixDrafterConfig()).models() == []


def test_drafters_of_one_name_are_numbered():
    three = auto(SMALL, SuffixDrafterConfig(), LARGE)
    assert list(three.member_names) == ["0-model", "suffix", "2-model"]


@pytest.mark.parametrize("rule", [VerifyRule.coupled, VerifyRule.rejection, VerifyRule.block])
def test_kinds_and_traits_are_those_of_any_of_them(rule):
    parts = [NgramDrafterConfig(), SMALL, TREE]
    kinds, traits = auto(*parts).sampling_kinds(rule, SYNC), auto(*parts).draft_traits
    assert kinds == set().union(*(one.sampling_kinds(rule, SYNC) for one in parts))
    assert traits == set().union(*(one.draft_traits for one in parts))
    assert SamplingKind.DETERMINISTIC in kinds and len(kinds) > 1 and DraftTrait.BRANCHES in traits


def test_it_is_built_of_its_drafters_and_says_what_they_hold():
    rest = RestDrafterConfig(datastore=small_store(), num_draft_tokens=9)
    both = auto(MaxgramDrafterConfig(num_draft_tokens=3), rest, SuffixDrafterConfig(width=2), num_draft_tokens=6)
    setup = DraftSetup(VerifyConfig(), "sync", SchedulerConfig(), SINGLE, "cpu", ())
    built: Any = both.build(setup)
    drafter, facts = built
    found = [(one.name, one.longest, one.is_shown, one.is_chain) for one in drafter.members]
    assert found == [("maxgram", 3, True, True), ("rest", 6, True, False), ("suffix", 6, True, False)]
    assert facts == {"datastore_tokens": 4 * 3001, "corpus_tokens": 0}


class Asked:
    """A drafter that notes how it is asked."""

    name, is_chain, num_draft_tokens, target_top_k, reads_prompts = "asked", True, 3, 0, False

    def __init__(self):
        self.calls: list[tuple[Any, ...]] = []

    def sampling_kinds(self, *asked):
        self.calls.append(("kinds", *asked))
        return {SamplingKind.IID}

    def check(self, *asked):
        self.calls.append(("check", *asked))

    def check_checkpoints(self, *asked):
        self.calls.append(("checkpoints", *asked))

    def translated_models(self):
        return ["translated"]

    def models(self):
        return ["model"]


def test_each_drafter_is_asked_under_its_own_place():
    one, two = Asked(), Asked()
    both: Any = auto(one, two)  # pyright: ignore[reportArgumentType]
    rule = VerifyRule.coupled
    assert both.sampling_kinds(rule, SYNC) == {SamplingKind.IID}
    both.check_fields("d")
    both.check_checkpoints("d")
    for i, drafter in enumerate((one, two)):
        place = f"d.drafters[{i}]"
        assert drafter.calls == [
            *(("kinds", rule, SYNC), ("check", place)),
            ("checkpoints", place),
        ]
    assert both.translated_models() == ["translated"] * 2 and both.models() == ["model"] * 2


@pytest.mark.parametrize(
    ("role", "attached", "separate"), [("draft", [], [SMALL]), ("draft2", [], []), ("target", [SMALL], [])]
)
def test_its_models_are_on_the_ranks_of_its_only_role(role, attached, separate):
    drafter = auto(NgramDrafterConfig(), SMALL)
    for config, pipeline, models in (
        (drafter, "sync", attached),
        (drafter, "branches", separate),
        (replace(drafter, placement=Placement.separate), "sync", separate),
    ):
        assert [model.path for model in config.models_of(role, pipeline)] == [model.path for model in models]


OWN: list[dict[str, Any]] = [
    {"ranks": 2, "parallel": Parallel.tensor},
    {"device": "cpu"},
    {"num_threads": 1},
    {"online": True},
]


@pytest.mark.parametrize("own", OWN)
def test_a_draft_model_whose_fields_ask_for_ranks_of_its_own_is_separate_by_default(own):
    model = replace(SMALL, **own)
    assert SMALL.is_attached("sync") and auto(SMALL).is_attached("sync")
    assert not model.is_attached("sync") and not auto(NgramDrafterConfig(), model).is_attached("sync")
    assert replace(SMALL, placement=Placement.attached).is_attached("sync")
    assert not any(SMALL.is_attached(pipeline) for pipeline in ("plain", "pearl", "branches", "tree", "pingpong"))
