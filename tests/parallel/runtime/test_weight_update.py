"""Weights that are replaced in place give the numbers of a model that was loaded with them, however they are kept."""

from __future__ import annotations

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.model.layers.weight import Weight
from parallel.runtime.runner import open_model
from parallel.runtime.weight_update import update_weights
from tests.families import ENCODER_DECODERS, FAMILIES, LIKE_OTHERS
from tests.matrices import in_turn

WAYS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "stored bfloat16": {"weights": torch.bfloat16},
    "int8": {"weights": torch.int8},
    "w8a8": {"weights": "w8a8"},
    "stretched": {"stretch": 2},
    "sdpa": {"backend": "sdpa"},
}
CASES = [
    *in_turn((*FAMILIES, *ENCODER_DECODERS), ["float32"], times=LIKE_OTHERS),
    *(("Llama", way) for way in WAYS if way != "float32"),
]

FEW_EXPERTS = {family: FAMILIES[family] for family in ("Qwen2Moe", "Qwen3Moe")}
"""Those that have dozens of wide ones if nothing is said."""


def logits_of(model) -> torch.Tensor:
    model.open("text")
    model.set_source("text", [2, 7, 1, 8])  # without effect but for encoders
    output = model.forward([Span("text", 6, num_logits=6)], [3, 1, 4, 1, 5, 9])
    model.close("text")
    return output.logits


def places(model) -> list[int]:
    tensors = [
        value for part in model.decoder.walk() for value in vars(part).values() if isinstance(value, torch.Tensor)
    ]
    return sorted({one.data_ptr() for one in tensors if one.numel()})


@pytest.mark.extended
@pytest.mark.parametrize(("family", "way"), CASES)
def test_a_model_that_is_loaded_again_in_place_is_the_other_one_to_the_bit(tiny_checkpoint, family, way):
    first, second = (tiny_checkpoint(family, seed=seed, **FEW_EXPERTS.get(family, {})) for seed in (0, 1))
    model, expected = (open_model(path, num_slots=64, **WAYS[way]) for path in (first, second))
    before, where = logits_of(model), places(model)
    update_weights(model, second)
    assert torch.equal(logits_of(model), logits_of(expected))
    assert places(model) == where, "a captured pass reads the same addresses"
    update_weights(model, first)
    assert torch.equal(logits_of(model), before) and not torch.equal(before, logits_of(expected))


def test_codes_of_a_quantised_checkpoint_are_not_replaced(tiny_checkpoint, monkeypatch):
    first, second = (tiny_checkpoint("Llama", seed=seed) for seed in (0, 1))
    model = open_model(first, num_slots=64)
    before, packed = logits_of(model), [part for part in model.decoder.walk() if isinstance(part, Weight)][-1]
    monkeypatch.setattr(Weight, "holds_codes", property(lambda weight: weight is packed))  # as where there are kernels
    with pytest.raises(ValueError, match="a checkpoint's codes are not replaced; start with target.weights=bfloat16"):
        update_weights(model, second)
    assert torch.equal(logits_of(model), before)
