"""The layouts of LLaDA and Dream: what config.json says of them, and what of it is refused."""

from __future__ import annotations

import pytest

from parallel.model.checkpoint import tensor_shapes
from parallel.model.families.registry import read_config
from tests.actors.whole_text_diffusion import llada_config

LLAMA = {
    "hidden_size": 32,
    "vocab_size": 151700,
    "max_position_embeddings": 256,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_parameters": {"rope_theta": 5e5},
    "tie_word_embeddings": False,
}
LLADA = llada_config(LLAMA)
DREAM = LLAMA | {"architectures": ["DreamModel"], "use_sliding_window": False}
HEADS = "model.transformer.blocks.0.k_proj.weight"


def test_what_published_checkpoints_leave_out():
    """Masks and blocks."""
    llada, dream = read_config(LLADA).diffusion, read_config(DREAM).diffusion
    assert llada is not None and (llada.mask_token, llada.block_size) == (126336, 32)
    assert llada.sees_all and not llada.is_shifted
    assert dream is not None and (dream.mask_token, dream.block_size) == (151666, 32)
    assert dream.sees_all and dream.is_shifted and read_config(DREAM).qkv_bias


@pytest.mark.parametrize(
    ("changes", "keys", "inner"),
    [
        ({}, 16, 48),
        ({"n_kv_heads": None}, 32, 48),
        ({"n_kv_heads": None, "multi_query_attention": True}, 8, 48),
        ({"mlp_hidden_size": None}, 16, 128),
    ],
)
def test_sizes_that_follow_from_others(changes, keys, inner):
    shapes = tensor_shapes(read_config(LLADA | changes))
    assert shapes[HEADS] == (keys, 32)
    assert shapes["model.transformer.blocks.1.ff_proj.weight"] == (inner, 32)
    assert shapes["model.transformer.ff_out.weight"] == shapes["model.transformer.wte.weight"] == (151700, 32)


def test_tied_tables_biases_and_a_longer_table():
    shapes = tensor_shapes(read_config(LLADA | {"weight_tying": True, "include_qkv_bias": True}))
    assert "model.transformer.ff_out.weight" not in shapes
    assert shapes["model.transformer.blocks.0.q_proj.bias"] == (32,)
    assert "model.transformer.blocks.0.attn_out.bias" not in shapes
    assert read_config(LLADA | {"embedding_size": 151808}).vocab_size == 151808


@pytest.mark.parametrize(
    "changes",
    [
        {"block_type": "sequential"},
        {"layer_norm_type": "default"},
        {"activation_type": "swiglu"},
        {"rope": False},
        {"alibi": True},
        {"scale_logits": True},
        {"include_bias": True},
        {"attention_layer_norm": True},
        {"input_emb_norm": True},
        {"bias_for_layer_norm": True},
        {"block_group_size": 2},
        {"mask_token_id": 151700},
        {"n_layers": None},
    ],
)
def test_what_the_engine_does_not_compute_is_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=name) as caught:
        read_config(LLADA | changes)
    assert "\n" not in str(caught.value)
