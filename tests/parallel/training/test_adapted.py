"""The decoder that is trained equals the one that serves, adapters included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel.kernels.products import has_products
from parallel.model.config import DecoderConfig, RopeScaling
from parallel.model.decoder import Decoder
from parallel.model.layers.weight import Weight
from parallel.runtime.runner import Span, open_model
from parallel.training.adapted import AdaptedDecoder, block_weights

TOKENS = torch.arange(24) * 7 % 90


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request, tmp_path_factory):
    """A random model of the family, and its path."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(1)
    is_llama = request.param == "llama"
    model = LlamaForCausalLM(LlamaConfig(**shape)) if is_llama else Qwen3ForCausalLM(Qwen3Config(**shape))
    for weight in model.parameters():
        weight.data.mul_(3 if weight.dim() > 1 else 1)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


def served(runner):
    runner.open(0)
    logits = runner.forward([Span(0, len(TOKENS), None, len(TOKENS))], TOKENS.tolist()).logits
    runner.close(0)
    return logits


def test_logits_are_those_that_are_served_before_and_after_folding(checkpoint):
    runner = open_model(checkpoint, num_slots=64)
    model = AdaptedDecoder(runner.config, checkpoint, "cpu", 8)
    adapters = model.zero_adapters()
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(TOKENS[None], len(TOKENS), adapters), served(runner), atol=1e-4, rtol=1e-4
        )
        for up, _ in adapters:
            up.normal_(std=0.05)
        scales = [0.5] * len(adapters)
        expected = model.logits(TOKENS[None], len(TOKENS), adapters, scales)
    shipped = served(runner)
    for weight, matrix in zip(block_weights(runner.decoder.layers), model.folded(adapters, 0.5), strict=True):
        weight.assign(matrix)
    assert (expected - shipped).abs().max() > 0.05, "the adapters change nothing: the test shows nothing"
    torch.testing.assert_close(served(runner), expected, atol=1e-4, rtol=1e-4)
    for weight, matrix in zip(block_weights(runner.decoder.layers), model.weights, strict=True):
        weight.assign(matrix)
    assert torch.equal(served(runner), shipped), "the shipped weights are not back to the bit"


def test_windows_of_a_batch_do_not_read_each_other_nor_what_follows(checkpoint):
    runner = open_model(checkpoint, num_slots=64)
    model = AdaptedDecoder(runner.config, checkpoint, "cpu", 8)
    with torch.no_grad():
        both = model.logits(torch.stack([TOKENS, TOKENS.flip(0)]), 5)
        torch.testing.assert_close(both[5:], model.logits(TOKENS.flip(0)[None], 5), atol=1e-5, rtol=1e-5)
        changed = TOKENS.clone()
        changed[-1] = 3
        torch.testing.assert_close(both[:4], model.logits(changed[None], 5)[:4], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8, "w8a8"])
def test_an_assigned_weight_multiplies_as_a_loaded_one(stored, packed):
    if packed and not has_products():
        pytest.skip("no C++ compiler")
    matrices = torch.randn(2, 35, 20)
    x = torch.randn(3, 20)

    def loaded(matrix):
        weight = Weight(35, 20, dtype=torch.float32, device="cpu")
        if stored != torch.float32:
            weight.store_as(stored)
        weight.shard("w", slice(35)).destination.copy_(matrix)
        if packed:
            weight.pack()
        return weight

    weight = loaded(matrices[0])
    before = weight.multiply(x)
    weight.assign(matrices[1])
    assert torch.equal(weight.multiply(x), loaded(matrices[1]).multiply(x))
    assert not torch.equal(weight.multiply(x), before)


def test_other_decoders_are_refused_in_one_line():
    config = DecoderConfig(97, 32, 2, 4, 2, 8, 48, 1e-5, 64, RopeScaling(), tied=True)
    config.check_adaptable()
    assert len(block_weights(Decoder(config).layers)) == 8
    for field, value in {"norm": "layer", "num_experts": 4, "rope": None, "activation": "relu"}.items():
        with pytest.raises(ValueError, match="cannot be adapted"):
            replace(config, **{field: value}).check_adaptable()
