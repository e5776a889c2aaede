"""Every refusal of the records of drafters with models: options that are refused name the field and its value, and the
same options with one of them changed are accepted, so that each half of a condition counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.drafters.config import Placement
from actors.drafters.model.config import (
    Calibration,
    CalibrationPolicy,
    Draws,
    LengthRule,
    MlpParallel,
    ModelDrafterConfig,
    Parallel,
    PassDrafterConfig,
    Strategy,
    Translation,
)
from actors.drafters.self_speculation.config import Search, SelfDrafterConfig
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.options import INDEPENDENT_ONLY, PipelineName, VerifyRule
from tests.actors.drafters.model.test_config_properties import AHEAD, SYNC, refused

MODEL, OWN, SPECULATOR = ModelDrafterConfig(path="x"), SelfDrafterConfig(), SpeculatorDrafterConfig(path="x")
ATTACHED = Placement.attached
BY_LAYER = dict(parallel=Parallel.layer)

REFUSED = [
    (MODEL, dict(placement=ATTACHED, parallel=Parallel.tensor), "parallel", [dict(placement=Placement.separate)]),
    (MODEL, dict(ranks=2), "ranks", [dict(parallel=Parallel.tensor), BY_LAYER, dict(ranks=1)]),
    (MODEL, dict(translate=Translation.strings, strategy=Strategy.tree), "translate", [dict(strategy=Strategy.chain)]),
    (
        MODEL,
        dict(translate=Translation.strings, vocabulary="v"),
        "vocabulary",
        [dict(translate=Translation.intersection), dict(vocabulary="")],
    ),
    (MODEL, dict(vocabulary_size=9), "vocabulary_size", [dict(vocabulary="v"), dict(vocabulary_size=0)]),
    (MODEL, dict(layer_group=2), "layer_group", [BY_LAYER, dict(layer_group=1)]),
    (MODEL, dict(layer_partition=[1, 2]), "layer_partition", [BY_LAYER, dict(layer_partition=[])]),
    (MODEL, dict(prefixes=[1], **BY_LAYER), "prefixes", [dict(parallel=Parallel.tensor), dict(prefixes=[])]),
    (
        MODEL,
        dict(mlp_parallel=MlpParallel.tensor, calibration=Calibration.broadcast, **BY_LAYER),
        "calibration",
        [dict(mlp_parallel=MlpParallel.auto), dict(calibration=Calibration.owner)],
    ),
    (
        MODEL,
        dict(mask_drafts=2, mask_steps=1, strategy=Strategy.tree),
        "mask_drafts",
        [dict(mask_steps=2), dict(mask_steps=0), dict(mask_drafts=1)],
    ),
    (MODEL, dict(mask_drafts=2), "mask_drafts", [dict(strategy=Strategy.best_first), dict(mask_drafts=1)]),
    (MODEL, dict(online_state="s"), "online_state", [dict(online=True), dict(online_state="")]),
    (MODEL, dict(online=True, prefixes=[1]), "online", [dict(prefixes=[]), dict(online=False)]),
    (
        MODEL,
        dict(online=True, parallel=Parallel.tensor),
        "online",
        [dict(parallel=Parallel.single), dict(online=False)],
    ),
    (MODEL, dict(online=True, ranks=2, **BY_LAYER), "online", [dict(online=False)]),
    (MODEL, dict(online=True, vocabulary="v"), "online", [dict(vocabulary=""), dict(online=False)]),
    (MODEL, dict(online=True, translate=Translation.strings), "online", [dict(translate=Translation.auto)]),
    (SPECULATOR, dict(online=True, placement=ATTACHED), "online", [dict(placement=Placement.auto), dict(online=False)]),
    (SPECULATOR, dict(online=True, weights="packed"), "online", [dict(weights="auto"), dict(online=False)]),
    (SPECULATOR, dict(path=""), "path", [dict(path="x")]),
    (
        SPECULATOR,
        dict(length_rule=LengthRule.gap, strategy=Strategy.tree),
        "length_rule",
        [dict(strategy=Strategy.chain), dict(length_rule=LengthRule.ordered)],
    ),
    (
        SPECULATOR,
        dict(least_probability=0.5),
        "least_probability",
        [dict(length_rule=LengthRule.probability), dict(least_probability=0.0)],
    ),
    (OWN, dict(placement=Placement.separate), "placement", [dict(placement=ATTACHED), dict(placement=Placement.auto)]),
    (OWN, dict(search=Search.fly, exit=2), "exit", [dict(search=Search.none), dict(exit=0)]),
    (OWN, dict(search=Search.swift, skip=["1"]), "skip", [dict(search=Search.none), dict(skip=[])]),
    (OWN, dict(search=Search.clasp, layers="f"), "layers", [dict(search=Search.none), dict(layers="")]),
    (OWN, dict(skip=["1"], layers="f"), "skip", [dict(skip=[]), dict(layers="")]),
    (OWN, dict(skip=["1b"]), "skip", [dict(skip=["1a"]), dict(skip=["1m", "2"])]),
    (OWN, dict(calibrate_every=2), "calibration_policy", [dict(calibrate_every=1)]),
    (
        OWN,
        dict(calibration_policy=CalibrationPolicy.never),
        "calibration_policy",
        [dict(calibration_policy=CalibrationPolicy.every)],
    ),
    *(
        (OWN, {key: value}, key, [{}])
        for key, value in {"kv_slots": 5, "dtype": "float32", "weights": "int8", "attention": "sdpa"}.items()
    ),
]


@pytest.mark.parametrize(("config", "options", "key", "repairs"), REFUSED, ids=lambda one: str(one)[:60])
def test_a_refusal_names_its_field_and_each_repair_ends_it(config, options, key, repairs):
    wrong = replace(config, **options)
    found = refused(wrong.check, "drafter")
    assert found is not None and found[0] == f"drafter.{key}"
    for repair in repairs:
        assert refused((replace(wrong, **repair) if repair else config).check, "drafter") is None, repair


PIPELINES = (*SYNC, *AHEAD)
WITH = [
    (SPECULATOR, dict(prune_below=0.1), "prune_below", lambda rule, _: rule is not VerifyRule.coupled),
    (SPECULATOR, dict(length_rule=LengthRule.gap), "length_rule", lambda _, pipeline: pipeline in AHEAD),
    (
        SPECULATOR,
        dict(length_rule=LengthRule.priced),
        "length_rule",
        lambda rule, pipeline: pipeline in AHEAD or rule is not VerifyRule.coupled,
    ),
    (OWN, {}, None, lambda _, pipeline: pipeline is not PipelineName.sync),
]


@pytest.mark.parametrize(
    ("config", "options", "key", "is_wrong"), WITH, ids=["prune_below", "length_rule", "priced", "self"]
)
def test_what_a_rule_or_a_pipeline_excludes(config, options, key, is_wrong):
    wrong = replace(config, **options)
    for rule in VerifyRule:
        for pipeline in PIPELINES:
            found = refused(wrong.check_with, rule, pipeline)
            field = "drafter" if key is None else f"drafter.{key}"
            assert (found is not None and found[0] == field) == is_wrong(rule, pipeline), (rule, pipeline)
            if options:
                assert refused(config.check_with, rule, pipeline) is None


@pytest.mark.parametrize(
    ("options", "num_layers", "kept"),
    [
        ({}, 6, ("012", "012")),
        ({}, 7, ("012", "012")),
        (dict(exit=2), 6, ("01", "01")),
        (dict(skip=["1", "3a", "4m"]), 6, ("0245", "0235")),
        (dict(exit=4, skip=["0m", "3", "5a"]), 6, ("012", "12")),
    ],
)
def test_the_layers_that_draft(options, num_layers, kept):
    plan = replace(OWN, **options).layer_plan(num_layers)
    assert (plan.attention, plan.mlp) == tuple(tuple(map(int, part)) for part in kept)


def test_layers_that_the_target_lacks_and_choices_that_leave_none_or_all():
    for options, num_layers, key in (
        (dict(exit=6), 6, "exit"),
        (dict(exit=5), 6, None),
        (dict(skip=["6"]), 6, "skip"),
        (dict(skip=["5m"]), 6, None),
        (dict(exit=1, skip=["0"]), 6, "skip"),
        (dict(exit=1, skip=["0a"]), 6, None),
    ):
        found = refused(replace(OWN, **options).check_layers, num_layers)
        assert (found and found[0]) == (key and f"drafter.{key}"), options


@pytest.mark.parametrize(
    ("options", "widest"),
    [
        (dict(strategy=Strategy.chain, width=4), 1),
        (dict(strategy=Strategy.tree, width=3), 3),
        (dict(strategy=Strategy.tree, width=3, branching=[2, 5, 1]), 5),
        (dict(strategy=Strategy.beam, width=7), 7),
    ],
)
def test_the_most_children_of_a_node(options, widest):
    config: PassDrafterConfig = replace(MODEL, **options)
    assert config.widest == widest and config.is_chain == (config.strategy is Strategy.chain)


def test_children_are_drawn_as_the_rule_wants_them_unless_the_options_say_how():
    for rule in VerifyRule:
        by_rule = MODEL.draw_kind(rule).name
        assert by_rule == ("IID" if rule in INDEPENDENT_ONLY else "WITHOUT_REPLACEMENT")
        assert replace(MODEL, draws=Draws.independent).draw_kind(rule).name == "IID"
        assert replace(MODEL, draws=Draws.without_replacement).draw_kind(rule).name == "WITHOUT_REPLACEMENT"
