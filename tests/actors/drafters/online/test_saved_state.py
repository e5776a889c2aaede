"""A learner's saved state is held against what a learner writes before any of it is used: it comes from a disk."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.actors.drafters.online.test_online import learner_of
from tests.damage import damaged_value, tried


@pytest.fixture
def state(models, tmp_path):
    """A saved state, its fields, and its tensors."""
    path = tmp_path / "state"
    learner_of(models).save(path)
    with safe_open(path, framework="pt") as file:
        fields = json.loads(file.metadata()["online"])
    return path, fields, load_file(path)


def written(path, fields, tensors):
    save_file(tensors, path, {"online": fields if isinstance(fields, str) else json.dumps(fields)})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_steps", "7", "num_steps='7': must be int"),
        ("num_steps", -1, "num_steps=-1: must be int >= 0"),
        ("num_averaged", None, "num_averaged"),
        ("num_averaged", 2**70, "num_averaged"),
        ("num_positions", 0.5, "num_positions=0.5: must be int"),
        ("num_rollbacks", [1], "num_rollbacks"),
        ("serves", 1, "serves=1: must be bool"),
    ],
)
def test_a_field_of_another_type_is_one_line_with_the_remedy(models, state, field, value, words):
    path, fields, tensors = state
    written(path, fields | {field: value}, tensors)
    _, line = tried(lambda: learner_of(models).restore(path))
    assert line.startswith(f"drafter.online_state={path}: is not a saved state") and words in line, line
    assert line.endswith("name a new file or delete it")
    written(path, {name: one for name, one in fields.items() if name != field}, tensors)
    assert field in tried(lambda: learner_of(models).restore(path))[1], "a missing field is named"


@pytest.mark.parametrize("name", ["live.0.up", "average.2.down"])
@pytest.mark.parametrize(
    "damage",
    [
        None,
        lambda tensor: tensor[:-1].contiguous(),
        lambda tensor: tensor.to(torch.int32),
        lambda tensor: tensor.to(torch.float64),
        lambda tensor: torch.full_like(tensor, float("nan")),
    ],
    ids=["missing", "another shape", "whole numbers", "another type", "not finite"],
)
def test_a_tensor_that_is_none_of_these_adapters_is_named(models, state, name, damage):
    path, fields, tensors = state
    tensor = tensors.pop(name)
    written(path, fields, tensors if damage is None else tensors | {name: damage(tensor)})
    _, line = tried(lambda: learner_of(models).restore(path))
    assert name in line and line.endswith("name a new file or delete it"), line


@pytest.mark.extended
def test_damaged_fields_are_refused_or_can_be_gone_on_with(models, state):
    path, fields, tensors = state
    rng, num_refused = random.Random(24), 0
    for _ in range(60):
        kind, content = damaged_value(fields, rng)
        written(path, json.dumps(content), tensors)
        learner = learner_of(models)
        _, line = tried(lambda learner=learner: learner.restore(path))
        num_refused += bool(line)
        if not line:
            assert type(learner.num_steps) is int and learner.num_steps >= 0, kind
            learner._step()
    assert num_refused > 30
    for text in ("", "{", "[]", "3", "[" * 100_000):
        written(path, text, tensors)
        assert tried(lambda: learner_of(models).restore(path))[1], text[:5]


def test_every_field_comes_back_as_it_was_saved(models, tmp_path):
    """Each of its own value, so that none is read for another."""
    learner, path = learner_of(models), tmp_path / "state"
    learner.num_steps, learner.num_positions, learner.num_rollbacks, learner._num_averaged = 3, 5, 7, 11
    for i, pair in enumerate((*learner._live, *learner._average)):
        for j, tensor in enumerate(pair):
            tensor.data.fill_(0.1 * i + 0.01 * j)
    learner.save(path)
    again = learner_of(models)
    again.restore(path)
    assert (again.num_steps, again.num_positions, again.num_rollbacks, again._num_averaged) == (3, 5, 7, 11)
    for saved, read in ((learner._live, again._live), (learner._average, again._average)):
        for pair, found in zip(saved, read, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(pair, found, strict=True))
    assert again.take_weights() is None, "it did not serve"


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_what_was_served_is_served_again_at_the_strength_of_now(models, state, serves, strength):
    path, fields, tensors = state
    ups = {name: torch.full_like(one, 0.1) for name, one in tensors.items() if name.endswith("up")}
    written(path, fields | {"serves": serves}, tensors | ups)
    learner = learner_of(models, strength=strength)
    learner.restore(path)
    weights = learner.take_weights()
    assert (weights is not None) == (serves and strength > 0)
    if weights is not None:
        expected = learner._model.folded(learner._average, strength)
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
