"""What a speculator takes is known before it is loaded, and leaves the pools room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.drafters.config import DraftSetup
from actors.drafters.model.config import CalibrationPolicy
from actors.drafters.speculator.config import SpeculatorDrafterConfig
from actors.drafters.speculator.drafter import build_speculator_drafter
from actors.options import SchedulerConfig, TargetConfig, VerifyConfig
from cluster.tools.training.speculators.recipes import RECIPES
from parallel.comm.group import SINGLE
from parallel.model.layers.weight import Weight
from parallel.runtime.kv_sizing import fit_slots
from parallel.runtime.runner import open_model
from parallel.speculators.registry import read_speculator
from tests.actors.small_speculators import TRAINED


@pytest.fixture
def setup(models):
    target = TargetConfig(path=str(models["target"]))
    return DraftSetup(VerifyConfig(), "sync", SchedulerConfig(max_num_seqs=3), SINGLE, "cpu", (1,), target)


def runner_of(config, setup) -> Any:
    return build_speculator_drafter(config, setup)[0].runner


ONE_OF_EACH_FOLDER = {RECIPES[recipe].module: recipe for recipe in reversed(TRAINED)}.values()


@pytest.mark.extended
@pytest.mark.parametrize("recipe", [*ONE_OF_EACH_FOLDER, "p_eagle"])
def test_the_bytes_counted_are_those_allocated(setup, speculator, recipe):
    config = SpeculatorDrafterConfig(path=str(speculator(recipe)), kv_slots=50)
    if read_speculator(config.path).runs_target:
        setup = replace(setup, target_runner=open_model(setup.target.path, num_slots=64))
    memory = config.memory(setup.target, 1, "cpu")
    runner = runner_of(config, setup)
    rows = vars(runner.pool).values() if hasattr(runner, "pool") else ()  # heads keep none
    tensors = [*rows, *vars(runner).values()]
    shaped = [one for one in tensors if getattr(one, "ndim", 0)]  # by slot, or layer and slot; one may be scratch
    taken = [one.nbytes // size for one in shaped for size in one.shape[:2] if size in (50, 51)]
    assert sum(taken) == pytest.approx(memory.bytes_per_slot, abs=8), "a mark or a token of a slot is not counted"
    layers = getattr(runner, "layers", None)
    weights = 0 if layers is None else sum(w.plain.nbytes for w in layers.walk() if isinstance(w, Weight))
    assert 0.8 * weights <= memory.weight_bytes


def test_a_separate_one_takes_what_is_free(setup, speculator, monkeypatch):
    config = SpeculatorDrafterConfig(path=str(speculator("eagle3")), dtype="bfloat16")
    memory = config.memory(setup.target, 1, "cpu")
    assert runner_of(config, setup).pool.num_slots == 3 * memory.max_positions
    room = memory.weight_bytes + 400 * memory.bytes_per_slot
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: room)
    assert runner_of(config, setup).pool.num_slots == 100, "of the memory left, a quarter on a CPU"
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match="do not fit the 0.00 GiB free on cpu"):
        config.build(setup)


@pytest.mark.parametrize("target_type", ["float32", "bfloat16"])
def test_an_attached_one_computes_in_the_type_of_the_tables_that_it_shares(setup, speculator, target_type):
    dtype = getattr(torch, target_type)
    setup = replace(setup, target_runner=open_model(setup.target.path, dtype=dtype, num_slots=64))
    config = SpeculatorDrafterConfig(path=str(speculator("eagle3")))
    for one in (config, replace(config, dtype=target_type)):
        weights = [each for each in runner_of(one, setup).layers.walk() if isinstance(each, Weight)]
        assert weights and {each.dtype for each in weights} == {dtype}
    other = "bfloat16" if target_type == "float32" else "float32"
    with pytest.raises(ValueError, match=f"^drafter.dtype={other}: shares the target's .* compute in {target_type}; "):
        runner_of(replace(config, dtype=other), setup)


@pytest.mark.extended
def test_an_attached_one_takes_room_from_the_targets_pool(setup, speculator, monkeypatch):
    monkeypatch.setattr("parallel.runtime.kv_sizing.free_bytes", lambda device: 10**7)
    config = SpeculatorDrafterConfig(path=str(speculator("dspark")))

    def fit(beside=(0, 0)):
        return fit_slots(setup.target.path, SINGLE, "cpu", "auto", max_num_seqs=10**6, beside=beside)

    weights, per_slot = config.memory_beside(setup.target, 1, "cpu", setup.scheduler)
    alone, own = fit().num_slots, fit().kv_bytes // fit().num_slots
    taken = alone * own - fit((weights, per_slot)).num_slots * (own + per_slot)
    assert taken == pytest.approx(weights / 4, abs=own + per_slot)
    given = replace(config, kv_slots=7).memory_beside(setup.target, 1, "cpu", setup.scheduler)
    assert given == (weights + 7 * per_slot, 0)


@pytest.mark.extended
def test_blocks_are_calibrated(models, speculator):
    """Else nothing would be drafted behind the first block of a text that is drafted ahead."""
    resolver = LaunchPaths(models["target"])
    for recipe, is_refused in (("dspark", True), ("p_eagle", True), ("eagle3", False)):
        config = SpeculatorDrafterConfig(path=str(speculator(recipe)), calibration_policy=CalibrationPolicy.never)
        if is_refused:
            with pytest.raises(ValueError, match=r"drafter\.calibration_policy=never: .* use every or mismatch"):
                config.with_paths(resolver)
        else:
            config.with_paths(resolver)


class LaunchPaths:
    """Paths are given as they are."""

    def __init__(self, target) -> None:
        self.target, self.target_layers, self.pipeline = str(target), 2, "sync"

    def checkpoint(self, key, path, *, is_model=True):
        return path

    def file(self, key, path, wanted):
        return path
