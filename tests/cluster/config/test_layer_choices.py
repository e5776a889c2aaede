"""Choices about layer-parallel drafting that make no sense, refused before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.config.quick_loading import load_quickly

LAYER = "drafter.parallel=layer"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["drafter=model", "drafter.layer_group=-1"], "drafter.layer_group=-1: must be 0 (as many as ranks) or above"),
        (
            ["drafter=model", "drafter.layer_partition=[2]"],
            "drafter.layer_partition=[2]: is for layers that run side by side; add",
        ),
        (["drafter=model", "drafter.calibrate_every=0"], "drafter.calibrate_every=0: must be at least 1"),
        (
            ["drafter=model", "drafter.calibrate_every=2", "drafter.calibration_policy=never"],
            "drafter.calibrate_every=2: counts rounds; add drafter.calibration_policy=every or drop it",
        ),
        (
            ["drafter=model", LAYER, "drafter.calibration=broadcast", "drafter.mlp_parallel=tensor"],
            "drafter.calibration=broadcast: the one rank that runs exact passes needs whole MLPs",
        ),
        (
            ["drafter=model", LAYER, "drafter.ranks=2"],
            "drafter.layer_group=2: the first and the last of the draft model's 2 layers",
        ),
        (
            ["drafter=model", LAYER, "drafter.ranks=2", "drafter.layer_partition=[[0],[2]]"],
            "drafter.layer_partition=[[0], [2]]: must",
        ),
        (
            ["drafter=model", LAYER, "drafter.layer_partition=[1,[1]]"],
            "drafter.layer_partition=[1, [1]]: mixes sizes and layers",
        ),
    ],
)
def test_choices_that_make_no_sense(overrides, line):
    with pytest.raises(ValueError) as refusal:
        load_quickly(overrides)
    assert str(refusal.value).startswith(line) and "\n" not in str(refusal.value)


def test_the_draft_model_must_have_more_than_one_layer(tiny_checkpoint, tmp_path: Path):
    shallow = json.loads((tiny_checkpoint("Llama") / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(shallow))
    with pytest.raises(ValueError, match="drafter.parallel=layer: the draft model has one layer"):
        load_quickly(["drafter=model", LAYER, f"drafter.path={tmp_path}"])


def test_the_bundled_drafter_may_be_given_a_partition():
    config = load_quickly(["drafter=model", LAYER, "drafter.ranks=2", "drafter.layer_partition=[[0,1]]"])
    assert config.drafter.layer_partition == [[0, 1]]
