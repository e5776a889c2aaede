"""The drafters of `drafter=auto` on the command line: names, keys, cascades, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineName, VerifyRule
from actors.protocol.messages import SamplingKind
from cluster import pocket
from cluster.engine import Engine
from cluster.placement.memory import footprints
from cluster.placement.ranks import Devices, lay_out
from cluster.runtime.backend import coordinator_spec
from tests.cluster.config.quick_loading import load_quickly

EXISTING = ("cluster=existing", "cluster.address=auto")


def auto(*overrides: str) -> Any:
    return load_quickly(["drafter=auto", *overrides]).drafter


def test_names_keys_and_levels_become_records():
    drafter = auto("drafter.drafters=[suffix,{name: model, num_draft_tokens: 3},[ngram,model]]")
    suffix, model, cascade = drafter.drafters
    assert isinstance(suffix, SuffixDrafterConfig) and isinstance(cascade, CascadeDrafterConfig)
    assert isinstance(model, ModelDrafterConfig) and model.num_draft_tokens == 3
    assert [type(level).__name__ for level in cascade.levels] == ["NgramDrafterConfig", "ModelDrafterConfig"]
    assert drafter.num_draft_tokens == suffix.num_draft_tokens == 8, "the most of its drafters"
    assert len(drafter.models()) == 2 and drafter.chooses_lengths


def test_the_launchs_own_draft_model_is_the_one_named_model():
    drafter = auto("drafter.path=pocket-deep")
    assert drafter.models() == [str(pocket.DEEP_DRAFTER.absolute())]


def test_drafters_of_one_kind_are_distinguished_in_reports():
    drafter = auto("drafter.drafters=[copy,{name: model, num_draft_tokens: 2},{name: model, num_draft_tokens: 7}]")
    assert drafter.member_names == ("copy", "1-model", "2-model")


def test_what_any_of_them_needs_the_whole_needs():
    drafter = auto("drafter.drafters=[{name: recycling, width: 6},{name: aded, width: 9, reads_prompts: false},model]")
    assert (drafter.target_top_k, drafter.reads_prompts) == (9, True)
    kinds = drafter.sampling_kinds(VerifyRule.rejection, PipelineName.sync)
    assert kinds == {SamplingKind.DETERMINISTIC, SamplingKind.WITHOUT_REPLACEMENT}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafters", "options", "attached"),
    [
        ("[suffix,model]", [], True),
        ("[suffix,model]", ["drafter.placement=attached"], True),
        ("[suffix,model]", ["drafter.placement=separate"], False),
        ("[suffix,{name: model, num_threads: 1}]", [], False),
        ("[suffix,model]", ["cluster.link_delay_ms=1"], False),
        ("[suffix,model]", ["job=drill"], False),
        ("[suffix,model]", [*EXISTING, "cluster.nodes=2"], False),
        ("[suffix,model]", [*EXISTING, "cluster.nodes=1"], True),
        ("[suffix,model]", [*EXISTING, "placement.nodes={draft:[n2]}"], False),
        ("[suffix,model]", [*EXISTING, "placement.nodes={target:[n1]}"], True),
        ("[suffix,model]", ["pipeline=pearl"], False),
        ("[suffix,speculator]", [], True),
        ("[suffix,speculator]", ["drafter.placement=separate"], False),
        ("[suffix,speculator]", ["pipeline=branches"], False),
        ("[ngram,self]", [], True),
        ("[suffix,[ngram,self]]", [], True),
    ],
)
def test_all_of_them_are_in_one_place(drafters, options, attached):
    config = load_quickly(["drafter=auto", f"drafter.drafters={drafters}", *options])
    drafter, pipeline = config.drafter, config.pipeline.name
    assert drafter.is_attached(pipeline) is attached
    assert drafter.is_bridged(pipeline) is ("speculator" in drafters and not attached)
    roles = {place.role for place in lay_out(config, Devices((0, 1)))}
    assert roles == ({"target"} if attached else {"target", "draft"})
    with_models = {role for role in ("target", "draft") if drafter.models_of(role, pipeline)}
    has_weights = "model" in drafters or "speculator" in drafters
    assert with_models == ({"target" if attached else "draft"} if has_weights else set())


def test_attached_drafters_take_memory_of_the_targets_ranks():
    config = load_quickly(["drafter=auto", "drafter.drafters=[suffix,model,speculator,self]"])
    places = config.target, 1, "cpu", config.scheduler
    parts = [one.memory_beside(*places) for one in config.drafter.drafters]  # pyright: ignore
    assert [held > 0 and per_slot > 0 for held, per_slot in parts] == [False, True, True, False]
    assert config.drafter.memory_beside(*places) == tuple(map(sum, zip(*parts, strict=True)))
    roles = lay_out(config, Devices((0, 1)))
    alone = load_quickly(["drafter=none"])
    with_drafters, without = footprints(config, roles)["target"], footprints(alone, roles)["target"]
    assert with_drafters.weights - without.weights == config.drafter.memory_beside(*places)[0]


def test_its_models_get_ranks_and_memory():
    config = load_quickly(["drafter=auto", "drafter.drafters=[copy,{name: model, ranks: 2, parallel: tensor}]"])
    places = lay_out(config, Devices((0, 1, 2)))
    assert [place.role for place in places] == ["target", "draft", "draft"]
    assert footprints(config, places)["draft"].weights > 0
    alone = load_quickly(["drafter=auto", "drafter.drafters=[copy,suffix]", "drafter.placement=separate"])
    places = lay_out(alone, Devices((0, 1, 2)))
    assert [place.share for place in places if place.role == "draft"] == [0.0], "lookups need no device"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafter.drafters=[]"], "must name at least one, as [suffix,model]"),
        (["drafter.drafters=[suffix,auto]"], "drafter.drafters[1]=auto: is no drafter; give a name or"),
        (["drafter.drafters=[none]"], "drafter.drafters[0]=none: is no drafter"),
        (["drafter.drafters=[{name: model, num_draft_tokens: 0}]"], "drafter.drafters[0].num_draft_tokens=0: must be"),
        (["drafter.drafters=[suffix,[ngram]]"], "drafter.drafters[1].levels=['ngram']: must be at least two"),
        (["pipeline=branches", "drafter.placement=attached"], "drafter.placement=attached: drafts between two passes"),
        (["drafter.drafters=[{name: model, placement: attached}]"], "is one for all of them; drop it, or give"),
        (
            ["drafter.drafters=[{name: model, ranks: 2, parallel: tensor}]", "drafter.placement=attached"],
            "drafter.drafters[0].parallel=tensor: shares the target's ranks",
        ),
        (
            ["drafter.drafters=[speculator,{name: speculator, num_draft_tokens: 2}]", "pipeline=branches"],
            "hidden states are sent to one drafter only, and several read them",
        ),
        (["verify=kseq"], "would bias the output of a drafter that chooses its tokens and draws none"),
        (
            ["drafter.drafters=[{name: cascade, levels: [ngram,model], lengths: auto}]"],
            "drafter.drafters[0].lengths=auto: measures rounds that other drafters take part in",
        ),
        (
            ["drafter.drafters=[model,{name: model, ranks: 2, parallel: tensor}]"],
            "must be the same for all models, which share their ranks",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(overrides, message):
    with pytest.raises(ValueError) as error:
        load_quickly(["drafter=auto", *overrides])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_coordinator_leaves_lengths_to_it():
    for drafter, chooses in (("auto", True), ("model", False)):
        config = load_quickly([f"drafter={drafter}"])
        assert coordinator_spec(config, lay_out(config, Devices((0, 1))), ()).chooses_lengths is chooses


@pytest.mark.parametrize(
    "ranks", [[], pytest.param(["target.tp=2", "cluster.oversubscribe=true"], marks=pytest.mark.slow)]
)
def test_an_engine_holds_drafters_of_every_kind(ranks):
    """A lookup, a draft model, a speculator and the target's own layers, all on its ranks: one batch in which requests
    name each of them, plain decoding and none."""
    drafters = "drafter.drafters=[ngram,model,speculator,self]"
    prompts = ["def median(values):", "class Stack:\n    def push(self"] * 3
    always = ["cluster=inprocess", "sampling.max_tokens=12", "pipeline.min_draft_tokens=1"]
    with Engine(load_quickly(["drafter=auto", drafters, *always, *ranks])) as engine:
        plain = engine.generate(prompts, drafter="none")
        names = [*engine.drafters, "none", None]
        requests = [engine.submit(prompt, drafter=name) for prompt, name in zip(prompts, names, strict=True)]
        drafted = [request.result() for request in requests]
        levels = engine.report().counters["levels"]
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert set(levels) >= {"model", "speculator", "self"}, "each drafted for the request that names it"
