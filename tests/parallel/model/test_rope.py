from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from parallel.model.families.registry import read_config
from parallel.model.layers.rope import Rope, rotate

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn tuned": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn with a factor given": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim", [16, 48])
def test_turns_as_transformers_does(name, head_dim):
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope_parameters=SCALINGS[name] | {"rope_theta": 5000.0},
        architectures=["LlamaForCausalLM"],
    )
    rope = Rope(read_config(config.to_dict()).rope, head_dim, torch.float32, "cpu")
    positions = torch.tensor([0, 1, 7, 63, 64, 200, 255])
    x = torch.randn(len(positions), 4, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotate(x, rope(positions)), expected[0].transpose(0, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_scalings_differ_from_the_default(name):
    positions = torch.arange(0, 256, 5)
    turned = [
        Rope(read_config(_llama(SCALINGS[kind])).rope, 16, torch.float32, "cpu")(positions)[0]
        for kind in ("default", name)
    ]
    assert (turned[0] - turned[1]).abs().max() > 0.1


def test_the_older_spelling_means_the_same():
    newer = _llama({"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0})
    older = _llama(None) | {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert read_config(older) == read_config(newer)


def _llama(rope_parameters):
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 8,
        "max_position_embeddings": 256,
        "rope_parameters": rope_parameters,
    }
