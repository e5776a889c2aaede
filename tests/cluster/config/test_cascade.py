"""The levels of a cascade on the command line: names, keys, defaults, and what is refused in one line."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from actors.drafters.cascade.config import LevelLengths
from actors.drafters.draft_ahead.tree import AHEAD as AHEAD_PIPELINES
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig, Strategy
from actors.drafters.model.drafter import ModelDrafter
from cluster import pocket
from cluster.engine import Engine
from cluster.placement.memory import footprints
from cluster.placement.ranks import Devices, lay_out
from tests.cluster.config.quick_loading import each_complaint_once, load_quickly


def cascade(*overrides: str) -> Any:
    return load_quickly(["drafter=cascade", *overrides]).drafter


def test_names_and_keys_become_records_and_paths_exist():
    drafter = cascade("drafter.levels=[maxgram,{name: model, num_draft_tokens: 3, dtype: float32},model]")
    base, middle, last = drafter.levels
    assert base.name == "maxgram" and base.max_places == 64
    assert isinstance(middle, ModelDrafterConfig) and (middle.num_draft_tokens, middle.dtype) == (3, "float32")
    assert drafter.models() == [str(pocket.DRAFTER)] * 2 and last.strategy is Strategy.chain


def test_the_draft_length_is_the_last_levels_and_its_tails_unless_it_is_given():
    assert cascade().num_draft_tokens == 5 and isinstance(cascade().levels[0], NgramDrafterConfig)
    assert cascade("drafter.tails=[0,3]").num_draft_tokens == 8
    assert cascade("drafter.merge=2").num_draft_tokens == 7
    assert cascade("drafter.num_draft_tokens=2").num_draft_tokens == 2


def test_a_checked_configuration_can_be_checked_again():
    """As `job=bench` does with every setting of its axes, which it also collects in a dictionary."""
    from dataclasses import replace

    from cluster.config.compose import checked

    config = load_quickly(["drafter=cascade"])
    assert checked(config).drafter == config.drafter
    assert hash(replace(config.drafter, num_draft_tokens=9)) != hash(config.drafter)


PASSING_ON = "drafter.levels=[{name: ngram, num_draft_tokens: 4},{name: model, num_draft_tokens: 0}]"


def test_a_level_that_passes_on_the_level_below_may_be_written_by_hand():
    assert cascade(PASSING_ON).num_draft_tokens == 4
    assert cascade("drafter.lengths=auto", "pipeline=sync").lengths is LevelLengths.auto


REFUSED = [
    (["drafter.levels=[ngram]"], "drafter.levels=['ngram']: must be at least two"),
    (
        ["drafter.levels=[recycling,{name: model, num_draft_tokens: 0},model]", "pipeline=sync"],
        "drafter.levels[0]=recycling: learns from level 1, which forwards drafts without a pass",
    ),
    (["drafter.levels=[ngram,eagle]"], "drafter.levels[1]=eagle: is no level; give a name or"),
    (["drafter.levels=[model,ngram]"], "drafter.levels[1]=ngram: only the first level may lack a model"),
    (["drafter.levels=[{name: ngram, pace: 2},model]"], "drafter.levels[0].pace: no such key"),
    (
        ["drafter.levels=[{name: ngram, max_ngram: n},model]"],
        "drafter.levels[0].max_ngram: value 'n' of type 'str' could not be converted to Integer; the default is",
    ),
    (["drafter.levels=[{name: ngram, min_ngram: 0},model]"], "drafter.levels[0].min_ngram=0: must be at least 1"),
    (
        ["drafter.levels=[ngram,{name: model, strategy: bush}]"],
        "drafter.levels[1].strategy: invalid value 'bush', expected one of",
    ),
    (
        ["drafter.levels=[ngram,{name: model, strategy: best_first}]"],
        "drafter.levels[1].strategy=best_first: a level that",
    ),
    (["drafter.levels=[ngram,{name: model, path: nowhere}]"], "drafter.levels[1].path=nowhere"),
    (["drafter.tails=[1]"], "drafter.tails=[1]: give one for each of the 2 levels"),
    (["drafter.tails=[1,0]"], "drafter.tails[0]=1: must be 0 or above, and 0 for the first"),
    (["drafter.tails=[0,2]", "verify=kseq"], "drafter.tails=(0, 2): are not drawn as verify=kseq needs"),
    (["drafter.lengths=auto", "drafter.placement=separate"], "drafter.lengths=auto: needs all levels in one"),
    (
        ["drafter.lengths=auto", "pipeline=branches"],
        "drafter.lengths=auto: needs levels and target to work in",
    ),
    (["drafter.lengths=auto", "drafter.tails=[0,2]"], "drafter.lengths=auto: chooses among levels without tails"),
    (["drafter.lengths=auto", "drafter.merge=2"], "drafter.lengths=auto: chooses among levels without tails"),
    (
        ["drafter.lengths=auto", "verify=transport"],
        "drafter.lengths=auto: may pass on a lookup, which is not drawn as",
    ),
    (
        ["drafter.levels=[{name: ngram, num_draft_tokens: 0},model]"],
        "drafter.levels[0].num_draft_tokens=0: must be at least 1",
    ),
    ([PASSING_ON, "drafter.tails=[0,2]"], "drafter.levels[1].num_draft_tokens=0: cannot have tails"),
    ([PASSING_ON, "drafter.lengths=auto"], "drafter.levels[1].num_draft_tokens=0: is the most that"),
    ([PASSING_ON, "pipeline=tree"], "drafter.levels[1].num_draft_tokens=0: prepares nothing while the target"),
    ([PASSING_ON, "verify=kseq"], "drafter.levels[1].num_draft_tokens=0: passes on a lookup"),
    (["drafter.merge=2", "verify=rejection"], "drafter.merge=2: is exact with verify=coupled only"),
    (["drafter.levels=[{name: model, ranks: 2, parallel: tensor},model]"], "drafter.levels[0]=model: needs"),
    (
        ["drafter.levels=[ngram,{name: model, ranks: 2, parallel: layer}]"],
        "drafter.levels[1].layer_group=2: the first and the last of the draft model's 2 layers run alone, so none "
        "run side by side; use drafter.levels[1].parallel=single or tensor, or give drafter.levels[1].layer_part",
    ),
]


@pytest.mark.extended
@pytest.mark.parametrize(("overrides", "line"), list(each_complaint_once(REFUSED)))
def test_refusals(overrides, line):
    with pytest.raises(ValueError) as caught:
        load_quickly(["drafter=cascade", *overrides])
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


SHARED = "{name: model, strategy: dynamic, batch_nodes: 4}"
AHEAD = "drafts of pipeline=branches are made one by one, ahead of time; use sync or pingpong, or drop it"


@pytest.mark.parametrize(
    "overrides, line",
    [
        (
            ["drafter=model", "drafter.batch_nodes=4"],
            "drafter.batch_nodes=4: is for trees that share a budget; add drafter.strategy",
        ),
        (
            ["drafter=model", "drafter.strategy=dynamic", "drafter.batch_nodes=4", "pipeline=branches"],
            f"drafter.batch_nodes=4: {AHEAD}",
        ),
        (
            ["drafter=cascade", f"drafter.levels=[{SHARED},model]", "drafter.placement=separate", "pipeline=branches"],
            f"drafter.levels[0].batch_nodes=4: {AHEAD}",
        ),
        (["drafter=model", "drafter.strategy=dynamic", "drafter.batch_nodes=4", "pipeline=pingpong"], None),
        (["drafter=cascade", f"drafter.levels=[{SHARED},model]", "pipeline=branches"], None),
    ],
)
def test_a_shared_budget_is_refused_where_nothing_would_share_it(overrides, line):
    if line is None:
        load_quickly(overrides)
    else:
        with pytest.raises(ValueError) as caught:
            load_quickly(overrides)
        assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


# --- levels on ranks of their own -------------------------------------------------------------------------------------

THREE = "drafter.levels=[ngram,{name: model, num_draft_tokens: 3},{name: model, num_draft_tokens: 5}]"


def places(cores: int, *overrides: str) -> dict[str, tuple[int, ...]]:
    config = load_quickly(["drafter=cascade", THREE, "drafter.placement=separate", *overrides])
    return {place.identity: place.cores for place in lay_out(config, Devices(tuple(range(cores))))}


def test_every_level_with_a_model_gets_cores_of_its_own():
    assert places(6) == {"target-0": (0, 1), "draft-0": (2, 3), "draft2-0": (4, 5)}
    assert places(3, "placement=colocated") == dict.fromkeys(("target-0", "draft-0", "draft2-0"), (0, 1, 2))
    assert list(places(3, "pipeline=plain")) == ["target-0"]
    with pytest.raises(ValueError, match="ranks need 3 cores, 2 here"):
        places(2)


def test_a_level_may_have_several_ranks():
    levels = "drafter.levels=[ngram,model,{name: model, ranks: 2, parallel: tensor}]"
    config = load_quickly(["drafter=cascade", levels, "drafter.placement=separate"])
    identities = [place.identity for place in lay_out(config, Devices(tuple(range(4))))]
    assert identities == ["target-0", "draft-0", "draft-1", "draft2-0"]
    assert set(footprints(config, lay_out(config, Devices(tuple(range(4)))))) == {"target", "draft", "draft2"}


TWO_RANKS = "ranks: 2, parallel: tensor"
LAYERS = "path: pocket-deep, ranks: 2, parallel: layer"
ON_RANKS = f"[{{name: model, num_draft_tokens: 3, {TWO_RANKS}}},{{name: model, num_draft_tokens: 5, {TWO_RANKS}}}]"
ON_LAYERS = f"[{{name: model, num_draft_tokens: 3, {LAYERS}}},{{name: model, num_draft_tokens: 5, {TWO_RANKS}}}]"


@pytest.mark.extended
@pytest.mark.parametrize(
    "overrides",
    [
        [THREE, "pipeline=branches", "sampling.temperature=0.8"],
        pytest.param([f"drafter.levels={ON_RANKS}", "target.tp=2", "pipeline=tree"], marks=pytest.mark.slow),
        pytest.param([f"drafter.levels={ON_RANKS}", "pipeline=sync", "verify=rejection"], marks=pytest.mark.slow),
        pytest.param([f"drafter.levels={ON_LAYERS}", "pipeline=branches"], marks=pytest.mark.slow),
        pytest.param([f"drafter.levels={ON_LAYERS}", "target.tp=2", "pipeline=pearl"], marks=pytest.mark.slow),
        pytest.param([THREE, "pipeline=sync"], marks=pytest.mark.slow),
        pytest.param([THREE, "pipeline=tree", "drafter.tails=[0,1,2]"], marks=pytest.mark.slow),
        pytest.param(["drafter.levels=[model,model,model]", "pipeline=pearl"], marks=pytest.mark.slow),
    ],
)
def test_an_engine_of_three_roles_and_more_gives_plain_decodings_tokens(overrides):
    prompts = ["def median(values):", "class Stack:"]
    common = ["drafter=cascade", "cluster=inprocess", "cluster.oversubscribe=true", "sampling.max_tokens=40"]
    config = load_quickly([*common, *overrides, "drafter.placement=separate", "pipeline.adaptive=false"])
    with Engine(config) as engine:
        drafted = engine.generate(prompts)
        report = engine.report()
        plain = engine.generate(prompts, drafter="none")
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    levels = report.counters["levels"].values()
    assert all(work["num_passes"] for work in levels)
    lanes = defaultdict(list)
    for lane, _, started, finished, _ in report.spans:
        lanes[lane].append((started, finished))
    verifying, drafting = lanes.pop("target"), {lane: spans for lane, spans in lanes.items() if lane != "messages"}
    assert len(drafting) == len(config.drafter.roles()), "each role has a lane in the timeline"
    if config.pipeline.name in AHEAD_PIPELINES:
        assert all(_overlap(spans, verifying) for spans in drafting.values()), "every level works while the target does"
    most = 3 * sum(work["num_passes"] + work["num_drafts"] for work in levels)
    assert sum(map(len, drafting.values())) < most, "a level that waits for the one below it takes steps in vain"
    assert not report.counters["num_role_losses"], "the ranks of a level took the same steps"


def _overlap(ours, theirs):
    return any(a < d and c < b for a, b in ours for c, d in theirs)


@pytest.mark.slow
def test_an_engine_goes_on_without_a_level_that_died(monkeypatch):
    """The level raises in the middle of the run; the others finish the requests with the same tokens.

    By default a level dies in `engine/test_restarts.py`.
    """
    propose, calls = ModelDrafter.propose, []

    def fail_later(self, contexts, budgets):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("the level broke")
        return propose(self, contexts, budgets)

    monkeypatch.setattr(ModelDrafter, "propose", fail_later)
    common = ["drafter=cascade", "drafter.levels=[model,model]", "drafter.placement=separate", "sampling.max_tokens=40"]
    common += ["cluster=inprocess", "cluster.oversubscribe=true", "pipeline.adaptive=false"]
    with Engine(load_quickly(common)) as engine:
        drafted = engine.generate(["def median(values):"])
        accepted = engine.report().counters["num_accepted_tokens"]
        plain = engine.generate(["def median(values):"], drafter="none")
    assert drafted[0].token_ids == plain[0].token_ids and accepted > 0
    assert len(calls) >= 4, "it broke, and its successor may have drafted on"
