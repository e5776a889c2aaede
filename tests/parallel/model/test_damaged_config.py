"""Damaged config.json: one line that names the field before a tensor is read, or a decoder that runs."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.model.checkpoint import find_tensors, tensor_shapes
from parallel.model.families.registry import read_config
from parallel.runtime.runner import open_model
from tests.damage import damaged_json
from tests.families import FAMILIES

NUM_DAMAGES = 20


@pytest.fixture
def copied(tiny_checkpoint, tmp_path):
    """A tiny checkpoint of a family, that may be damaged."""
    return lambda family: shutil.copytree(tiny_checkpoint(family, **FAMILIES[family]), tmp_path / family)


def refusal(directory):
    """The line with which the checkpoint is refused from its headers; empty if it is not."""
    try:
        find_tensors(directory, tensor_shapes(read_config(directory)))
    except ValueError as error:
        return str(error)
    return ""


def still_runs(directory):
    """Whether one pass of the model gives a row of logits."""
    runner = open_model(directory, num_slots=64)
    runner.open(0)
    output = runner.forward([Span(0, 3)], torch.tensor([1, 2, 3]))
    return output.logits.shape == (1, runner.config.vocab_size)


def try_damages(directory, rng, num_damages):
    """How many of the damages were refused."""
    file, num_refused = directory / "config.json", 0
    good, content = read_config(directory), file.read_text()
    for _ in range(num_damages):
        kind, damaged = damaged_json(content, rng)
        file.write_bytes(damaged)
        if line := refusal(directory):
            num_refused += 1
            assert "\n" not in line, kind
        elif read_config(directory) != good:
            assert still_runs(directory), kind
    return num_refused


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
def test_a_damaged_config_is_one_line_or_runs(copied, family):
    num_refused = try_damages(copied(family), random.Random(family), NUM_DAMAGES)
    assert NUM_DAMAGES / 4 < num_refused < NUM_DAMAGES


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_damaged_configs(copied, family):
    assert try_damages(copied(family), random.Random(f"many {family}"), 500) > 100


@pytest.mark.parametrize(
    ("family", "change", "line"),
    [
        ("Llama", {"num_hidden_layers": 2**31}, "num_hidden_layers=2147483648: must be int <= 4096"),
        ("Llama", {"num_hidden_layers": 0}, "num_hidden_layers=0: must be int >= 1"),
        ("Llama", {"num_hidden_layers": True}, "num_hidden_layers=True: must be int or null"),
        ("Llama", {"max_position_embeddings": 0}, "max_position_embeddings=0: must be int >= 1"),
        ("Llama", {"max_position_embeddings": None}, "max_position_embeddings: must be int, got null"),
        ("Llama", {"vocab_size": "97"}, "vocab_size='97': must be int or null"),
        ("Llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be float >= 0.0"),
        ("Llama", {"rope_parameters": 1e308}, r"rope_parameters=1e\+308: must be object or null"),
        ("Llama", {"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta=-1: must be float > 1.0"),
        ("Llama", {"architectures": [[]]}, r"architectures\[0\]=\[\]: must be str"),
        ("Llama", {"head_dim": 7}, "head_dim=7: must be even"),
        ("Llama", {"head_dim": None, "num_attention_heads": 64}, "num_attention_heads=64: is more than hidden_size=32"),
        ("Mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5: is more than 4"),
        ("Mixtral", {"num_hidden_layers": 4096, "num_local_experts": 64}, "=4096 of 64 experts: is too many"),
        ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types: names 1 layers, num_hidden_layers=2"),
        ("Qwen2", {"layer_types": ["words"] * 2}, "layer_types='words' is not supported"),
        ("Gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern=0: must be int >= 1"),
    ],
)
def test_the_field_is_named(copied, family, change, line):
    directory = copied(family)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=rf"{line}.*; (correct|fetch|supported)"):
        read_config(directory)


def test_every_family_reads_what_it_writes(copied):
    for family in FAMILIES:
        assert not refusal(copied(family)), family
