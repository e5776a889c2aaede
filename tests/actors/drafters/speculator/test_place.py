"""A speculator's record is held against its target and its pipeline before anything starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from actors.drafters.config import Placement
from actors.drafters.model.config import CalibrationPolicy
from actors.drafters.speculator.config import SpeculatorDrafterConfig


class Places:
    """Paths as they are, of a target of two layers."""

    target_layers = 2

    def __init__(self, target, pipeline="sync"):
        self.target, self.pipeline = str(target), pipeline

    def checkpoint(self, key, path, *, is_model=True):
        assert (key, is_model) == ("drafter.path", False)
        return path

    def file(self, key, path, wanted):
        raise AssertionError(key)


def refusal(config, places):
    try:
        config.with_paths(places)
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture
def wider(models, tmp_path):
    """The target as its record would be with twice the width."""
    shutil.copytree(models["target"], tmp_path / "wider")
    file = tmp_path / "wider" / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"hidden_size": 2 * fields["hidden_size"]}))
    return tmp_path / "wider"


@pytest.mark.parametrize("recipe", ["eagle3", "medusa"])
def test_a_speculator_of_another_target_is_refused(models, speculator, wider, recipe):
    config = SpeculatorDrafterConfig(path=str(speculator(recipe)))
    assert refusal(config, Places(models["target"])) == ""
    assert refusal(config, Places(wider)).startswith("drafter.path: ")


def test_what_a_method_cannot_do_is_refused_by_its_field(models, speculator):
    places = Places(models["target"])
    eagle = SpeculatorDrafterConfig(path=str(speculator("eagle3")))
    assert refusal(replace(eagle, calibration_policy=CalibrationPolicy.never), places) == ""
    assert refusal(replace(eagle, prune_below=0.1), places).startswith("drafter.prune_below=0.1: its checkpoint has")
    learns = replace(eagle, online=True)
    attached = replace(learns, placement=Placement.attached)
    assert refusal(attached, places).startswith("drafter.online=True: needs a rank that idles")
    assert refusal(learns, places) == "", "by itself it has a rank of its own"
    medusa = replace(learns, path=str(speculator("medusa")), placement=Placement.separate)
    assert refusal(medusa, places).startswith("drafter.online=True: ")
    assert refusal(replace(medusa, online=False), places) == ""


def test_its_paths_become_those_that_exist(models, speculator, tmp_path):
    folder = Path(speculator("eagle3"))
    config = SpeculatorDrafterConfig(path=str(folder), online=True, placement=Placement.separate)
    config = replace(config, online_state=str(tmp_path / "state"))
    assert config.with_paths(Places(models["target"])) == config
    lost = replace(config, online_state=str(tmp_path / "none" / "state"))
    assert refusal(lost, Places(models["target"])).startswith("drafter.online_state=")
