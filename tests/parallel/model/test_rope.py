"""Rotary embeddings against those of transformers, over all scalings and their parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from parallel.model.families.registry import read_config
from parallel.model.layers.rope import Rope, rotate
from tests.examples import examples

MAX_POSITIONS = 256
lengths = st.sampled_from([16, 32, 64, 128, MAX_POSITIONS])
factors = st.sampled_from([1.0, 2.0, 4.0, 7.5])
weights = st.sampled_from([0.7, 1.0, 1.2])


def scaling(rope_type, optional=None, **parameters):
    thetas = st.sampled_from([8.0, 500.0, 10000.0])  # with the least, YaRN's ramp is wider than a head
    fixed = {"rope_type": st.just(rope_type), "rope_theta": thetas}
    return st.fixed_dictionaries(fixed | parameters, optional=optional or {})


SCALINGS = {
    "default": scaling("default"),
    "linear": scaling("linear", factor=factors),
    "dynamic": scaling("dynamic", factor=factors),
    "llama3": scaling(
        "llama3",
        factor=factors,
        low_freq_factor=st.sampled_from([0.5, 1.0, 2.0]),
        high_freq_factor=st.sampled_from([2.5, 4.0, 8.0]),
        original_max_position_embeddings=lengths,
    ),
    "yarn": scaling(
        "yarn",
        {
            "beta_fast": st.sampled_from([1.0, 8.0, 16.0, 32.0]),
            "beta_slow": st.sampled_from([0.5, 1.0, 2.0]),
            "truncate": st.booleans(),
            "attention_factor": st.sampled_from([0.8, 1.3]),
            "mscale": weights,
            "mscale_all_dim": weights,
        },
        factor=factors,
        original_max_position_embeddings=lengths,
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", SCALINGS)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_turns_as_transformers_does(name, data):
    parameters, head_dim = data.draw(SCALINGS[name]), data.draw(st.sampled_from([6, 16, 48]))
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=parameters,
        architectures=["LlamaForCausalLM"],
    )
    rope = Rope(read_config(config.to_dict()).rope, head_dim, torch.float32, "cpu")
    positions = torch.tensor([0, 1, 7, 63, 64, 200, 255])
    x = torch.randn(len(positions), 4, head_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotate(x, rope(positions)), expected[0].transpose(0, 1), atol=5e-4, rtol=1e-4)


def test_the_older_spelling_means_the_same():
    newer = _llama({"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0})
    older = _llama(None) | {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert read_config(older) == read_config(newer)


def test_what_a_yarn_checkpoint_leaves_out():
    """The factor is that of the context over the original one, which older checkpoints name beside the scaling."""
    rope = read_config(_llama({"rope_type": "yarn"}) | {"original_max_position_embeddings": 64}).rope
    assert rope.factor == 4 and rope.original_max_position_embeddings == 64
    inner = read_config(_llama({"rope_type": "yarn", "original_max_position_embeddings": 128})).rope
    assert inner.factor == 2 and inner.original_max_position_embeddings == 128
    assert read_config(_llama({"rope_type": "yarn"})).rope.factor == 1


def _llama(rope_parameters):
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 8,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": rope_parameters,
    }
