"""Which layers run side by side for a user's choice, and the choices that are refused before anything is loaded."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.drafters.config import DraftSetup
from actors.drafters.model import loading
from actors.drafters.model.config import Calibration, MlpParallel, ModelDrafterConfig, Strategy
from actors.drafters.model.layer_partition import layer_partition
from actors.drafters.model.loading import layer_layout, open_draft_model
from actors.options import Parallel, SchedulerConfig, VerifyConfig
from parallel.comm.group import SINGLE
from parallel.model.config import DecoderConfig
from parallel.model.config_fields import MASK_FIELD
from parallel.model.families.registry import read_config
from parallel.runtime.layer_parallel_runner import LayerParallelRunner
from parallel.runtime.nested_runner import NestedRunner
from parallel.runtime.runner import ModelRunner
from parallel.speculators.pard import PardRunner


def config_of(**choices) -> ModelDrafterConfig:
    return ModelDrafterConfig(parallel=Parallel.layer, **choices)


def model_of(num_layers, middle=48) -> DecoderConfig:
    return read_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 97,
            "hidden_size": 32,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "intermediate_size": middle,
        }
    )


@pytest.mark.parametrize(
    ("choices", "sizes"),
    [
        (dict(ranks=2), [1, 2, 2, 2, 1]),
        (dict(ranks=3), [1, 3, 3, 1]),
        (dict(ranks=4), [1, 3, 3, 1]),
        (dict(ranks=6), [1, 3, 3, 1]),
        (dict(ranks=6, layer_group=6), [1, 6, 1]),
        (dict(ranks=4, layer_group=2), [1, 2, 2, 2, 1]),
        (dict(ranks=1, layer_group=4), [1, 3, 3, 1]),
        (dict(ranks=1), [1] * 8),
        (dict(ranks=2, layer_group=1), [1] * 8),
        (dict(ranks=2, layer_partition=[2, 2, 2, 2]), [2, 2, 2, 2]),
        (dict(ranks=2, layer_partition=[[0], [1, 2], [3, 4], [5], [6], [7]]), [1, 2, 2, 1, 1, 1]),
        (dict(ranks=1, layer_partition=[4, 4], layer_group=4), [4, 4]),
    ],
)
def test_the_layers_that_run_side_by_side(choices, sizes):
    assert [len(members) for members in layer_partition(config_of(**choices), model_of(8))] == sizes


@pytest.mark.parametrize(
    ("choices", "num_layers", "line"),
    [
        (dict(), 1, "drafter.parallel=layer: the draft model has one layer and nothing beside it; use"),
        (dict(ranks=2), 2, "drafter.layer_group=2: the first and the last of the draft model's 2 layers run alone"),
        (dict(ranks=2), 3, "drafter.layer_group=2: the first and the last of the draft model's 3 layers run alone"),
        (dict(ranks=9), 8, "drafter.ranks=9: the draft model has 8 layers to share; lower it"),
        (
            dict(ranks=2, layer_group=4),
            8,
            "drafter.layer_group=4: 3 layers side by side need 3 ranks, or 1 to compute them alone, not 2; "
            "make it at most 2 or set drafter.ranks=3",
        ),
        (dict(layer_partition=[1, 3]), 8, "drafter.layer_partition=[1, 3]: must name the layers 0 to 7 once each"),
        (dict(ranks=2, layer_partition=[1, 6, 1]), 8, "drafter.layer_partition=[1, 6, 1]: 6 layers side by side"),
        (
            dict(layer_partition=[4, 4], layer_group=2),
            8,
            "drafter.layer_partition=[4, 4]: drafter.layer_group=2 contradicts",
        ),
        (
            dict(ranks=5, mlp_parallel=MlpParallel.tensor),
            8,
            "drafter.mlp_parallel=tensor: 5 ranks cannot split MLPs of 48; use replicated",
        ),
    ],
)
def test_what_cannot_be_carried_out_is_refused_in_one_line(choices, num_layers, line):
    with pytest.raises(ValueError) as refusal:
        layer_partition(config_of(**choices), model_of(num_layers))
    assert str(refusal.value).startswith(line) and "\n" not in str(refusal.value)


def test_the_facts_of_a_layer_parallel_drafter(models):
    config = config_of(path=str(models["deep"]), layer_group=2, calibration=Calibration.owner)
    runner, facts = open_draft_model(config, SchedulerConfig(), SINGLE, "cpu")
    assert isinstance(runner, LayerParallelRunner)
    assert facts["layer_groups"] == [1, 2, 2, 1] and facts["weight_bytes"] == runner.decoder.nbytes()
    assert (facts["mlp_parallel"], facts["calibration"]) == ("replicated", "owner")
    runner, facts = open_draft_model(ModelDrafterConfig(path=str(models["deep"])), SchedulerConfig(), SINGLE, "cpu")
    assert not isinstance(runner, LayerParallelRunner) and "layer_groups" not in facts


def test_attention_is_computed_as_the_record_says_by_the_first_layers_and_behind_masks_too(models, tmp_path):
    record = ModelDrafterConfig(path=str(models["deep"]), attention="sdpa")
    nested, _ = open_draft_model(replace(record, prefixes=[1, 2]), SchedulerConfig(), SINGLE, "cpu")
    assert isinstance(nested, NestedRunner) and nested.attention == "sdpa"
    shutil.copytree(models["deep"], tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {MASK_FIELD: 3}))
    filling, _ = open_draft_model(replace(record, path=str(tmp_path)), SchedulerConfig(), SINGLE, "cpu")
    assert isinstance(filling, PardRunner) and isinstance(filling.runner, ModelRunner)
    assert filling.runner.attention == "sdpa"


@pytest.mark.parametrize(
    ("pipeline", "strategy", "rows"),
    [
        ("sync", Strategy.chain, 1),
        ("sync", Strategy.tree, 3),
        ("pearl", Strategy.chain, 1),
        ("branches", Strategy.chain, 7),
        ("tree", Strategy.tree, 7),
    ],
)
def test_mlps_are_measured_over_the_rows_they_will_mostly_see(models, monkeypatch, pipeline, strategy, rows):
    measured = []
    monkeypatch.setattr(loading, "faster_mlp", lambda *args: measured.append(args[-1]) or "replicated")
    config = config_of(path=str(models["deep"]), layer_group=2, strategy=strategy, width=3, ahead_width=7)
    config.build(DraftSetup(VerifyConfig(), pipeline, SchedulerConfig(), SINGLE, "cpu", ()))
    assert measured == [rows]


def test_broadcast_keeps_whole_mlps_whatever_is_faster(models):
    two: Any = SimpleNamespace(rank=0, size=2)
    config = config_of(path=str(models["deep"]), ranks=2, calibration=Calibration.broadcast)
    assert layer_layout(config, two, "cpu").mlp == "replicated"
