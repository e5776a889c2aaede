"""Weights that are replaced in place give the numbers of a model that was loaded with them, however they are kept."""

from __future__ import annotations

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.runtime.runner import open_model
from parallel.runtime.weight_update import update_weights
from tests.families import FAMILIES

WAYS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "stored bfloat16": {"weights": torch.bfloat16},
    "int8": {"weights": torch.int8},
    "stretched": {"stretch": 2},
    "sdpa": {"backend": "sdpa"},
}
CASES = [*((family, "float32") for family in FAMILIES), *(("Llama", way) for way in WAYS if way != "float32")]


def logits_of(model) -> torch.Tensor:
    model.open("text")
    output = model.forward([Span("text", 6, num_logits=6)], [3, 1, 4, 1, 5, 9])
    model.close("text")
    return output.logits


def places(model) -> list[int]:
    tensors = [
        value for part in model.decoder.walk() for value in vars(part).values() if isinstance(value, torch.Tensor)
    ]
    return sorted({one.data_ptr() for one in tensors if one.numel()})


@pytest.mark.parametrize(("family", "way"), CASES)
def test_a_model_that_is_loaded_again_in_place_is_the_other_one_to_the_bit(tiny_checkpoint, family, way):
    first, second = (tiny_checkpoint(family, seed=seed) for seed in (0, 1))
    model, expected = (open_model(path, num_slots=64, **WAYS[way]) for path in (first, second))
    before, where = logits_of(model), places(model)
    update_weights(model, second)
    assert torch.equal(logits_of(model), logits_of(expected))
    assert places(model) == where, "a captured pass reads the same addresses"
    update_weights(model, first)
    assert torch.equal(logits_of(model), before) and not torch.equal(before, logits_of(expected))
