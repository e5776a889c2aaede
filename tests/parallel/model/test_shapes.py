"""What a config.json says of positions, windows and tensors, against what the families' papers and files say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallel.model.checkpoint import block_tensors, end_tensors, tensor_shapes
from parallel.model.config import CheckpointNames, HeadRows, RopeScaling
from parallel.model.families.fields import architecture_of, read_rope, sliding_layers
from parallel.model.families.registry import read_config
from parallel.speculators.streams.layouts import StreamsConfig
from parallel.training.adapted import AdaptedDecoder

HF: dict[str, Any] = {"max_position_embeddings": 4096, "num_hidden_layers": 4}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
BASE = read_config(LLAMA)


@pytest.mark.parametrize(
    ("hf", "given", "expected"),
    [
        ({}, None, RopeScaling(original_max_position_embeddings=4096)),
        ({"rope_theta": 5e5}, None, RopeScaling(rope_theta=5e5, original_max_position_embeddings=4096)),
        ({"rope_theta": 5e5}, {"rope_theta": 2e4}, RopeScaling(rope_theta=2e4, original_max_position_embeddings=4096)),
        (
            {},
            {"type": "linear", "factor": 2.0},
            RopeScaling("linear", factor=2.0, original_max_position_embeddings=4096),
        ),
        (
            {},
            {"rope_type": "dynamic", "type": "linear", "factor": None},
            RopeScaling("dynamic", original_max_position_embeddings=4096),
        ),
        (
            {},
            {"rope_type": "yarn", "original_max_position_embeddings": 1024},
            RopeScaling("yarn", factor=4.0, original_max_position_embeddings=1024),
        ),
        (
            {"original_max_position_embeddings": 512},
            {"rope_type": "yarn", "original_max_position_embeddings": 1024, "factor": 3.0, "truncate": False},
            RopeScaling("yarn", factor=3.0, original_max_position_embeddings=512, truncate=False),
        ),
        (
            {},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.5},
            RopeScaling("llama3", 1e4, 8.0, 4096, 1.0, 1.5),
        ),
        ({"partial_rotary_factor": 1.0}, None, RopeScaling(original_max_position_embeddings=4096)),
        (
            {"partial_rotary_factor": 0.5},
            {"partial_rotary_factor": 1.0},
            RopeScaling(original_max_position_embeddings=4096),
        ),
    ],
)
def test_rotary_positions(hf, given, expected):
    assert read_rope(HF | hf, given) == expected


@pytest.mark.parametrize(
    ("hf", "given", "line"),
    [
        ({}, {"rope_type": "llama3"}, "'llama3' needs a factor"),
        ({}, {"rope_type": "linear", "factor": None}, "'linear' needs a factor"),
        ({}, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, None, "partial_rotary_factor"),
        ({}, {"rope_type": "su"}, "rope_type='su' is not supported"),
    ],
)
def test_rotary_positions_that_are_not_computed(hf, given, line):
    with pytest.raises(ValueError, match=line):
        read_rope(HF | hf, given)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (None, (0, 2)),
        ([], (0, 2)),
        (["full_attention", "sliding_attention"] * 2, [1, 3]),
        (["sliding_attention"] * 9, [0, 1, 2, 3]),
        (["full_attention"] * 4, []),
    ],
)
def test_layers_with_a_window(types, expected):
    assert sliding_layers(HF | {"layer_types": types}, (0, 2)) == expected
    with pytest.raises(ValueError, match="names 3 layers, num_hidden_layers=4"):
        sliding_layers(HF | {"layer_types": ["full_attention"] * 3}, ())


@pytest.mark.parametrize(("named", "found"), [(["A", "B"], "A"), ("A", "A"), ([], ""), (None, "")])
def test_the_architecture_is_the_first_that_is_named(named, found):
    assert architecture_of({"architectures": named}) == found


@pytest.mark.parametrize(
    ("window", "layers", "expected"),
    [(16, (0, 2), (16, {0, 2})), (0, (0,), (None, set())), (None, (0,), (None, set())), (16, (), (None, set()))],
)
def test_a_window_is_one_of_some_layers(window, layers, expected):
    config = BASE.with_window(window, layers)
    assert (config.window, config.windowed) == expected


def test_a_stretched_model_has_more_layers_that_are_as_its_last():
    longer = BASE.with_window(16, (0, 2)).stretched(2)
    assert (longer.num_layers, longer.stretch, longer.windowed) == (5, 2, {0, 2, 3, 4})
    assert BASE.with_window(16, (0, 1)).stretched(2).windowed == {0, 1} and longer.stretched(1).stretch == 3
    after = replace(BASE, norm_placement="after")
    assert after.stretched(0) == after
    with pytest.raises(ValueError, match="use stretch=0"):
        after.stretched(1)


def test_a_head_of_some_rows():
    some = replace(BASE, head=HeadRows((3, 5), (0, 7), 90))
    assert (BASE.num_head_rows, BASE.num_logits) == (100, 100) and (some.num_head_rows, some.num_logits) == (2, 90)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (4, 1), (8, 1)])
def test_kv_heads_of_a_rank(ranks, heads):
    assert BASE.local_kv_heads(ranks) == heads


QUERIES, KEYS = (64, 64), (16, 64)
PLAIN = {
    "self_attn.q_proj.weight": (QUERIES, "heads"),
    "self_attn.k_proj.weight": (KEYS, "kv_heads"),
    "self_attn.v_proj.weight": (KEYS, "kv_heads"),
    "self_attn.o_proj.weight": ((64, 64), "heads"),
    "input_layernorm.weight": ((64,), "whole"),
    "post_attention_layernorm.weight": ((64,), "whole"),
    "mlp.gate_proj.weight": ((96, 64), "mlp"),
    "mlp.up_proj.weight": ((96, 64), "mlp"),
    "mlp.down_proj.weight": ((64, 96), "mlp"),
}
QKV_BIAS = {f"self_attn.{name}_proj.bias": (((64,), "heads") if name == "q" else ((16,), "kv_heads")) for name in "qkv"}
MLP_BIAS = {
    "mlp.gate_proj.bias": ((96,), "mlp"),
    "mlp.up_proj.bias": ((96,), "mlp"),
    "mlp.down_proj.bias": ((64,), "whole"),
}
NORM_BIAS = {f"{name}.bias": ((64,), "whole") for name in ("input_layernorm", "post_attention_layernorm")}


def blocks(config):
    return {name: (shape, split) for name, shape, split in block_tensors(config)}


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {}),
        ({"qkv_bias": True}, QKV_BIAS),
        ({"o_bias": True}, {"self_attn.o_proj.bias": ((64,), "whole")}),
        ({"mlp_bias": True}, MLP_BIAS),
        ({"qk_norm": True}, {f"self_attn.{name}_norm.weight": ((8,), "whole") for name in "qk"}),
        ({"norm": "layer"}, NORM_BIAS),
        (
            {"norm_placement": "around", "names": CheckpointNames(attention_out_norm="a", mlp_out_norm="b")},
            {"a.weight": ((64,), "whole"), "b.weight": ((64,), "whole")},
        ),
        ({"norm_placement": "after", "names": CheckpointNames(attention_out_norm="a", mlp_out_norm="b")}, {}),
    ],
)
def test_tensors_of_a_block(changes, more):
    assert blocks(replace(BASE, **changes)) == PLAIN | more


def test_tensors_of_an_mlp_without_gates_and_of_experts():
    assert blocks(replace(BASE, gated=False)) == {name: one for name, one in PLAIN.items() if "gate" not in name}
    names = CheckpointNames(router="r", experts="e", gate="g", up="u", down="d")
    found = blocks(replace(BASE, num_experts=2, names=names))
    experts = {f"e.{i}.{name}.weight": ((96, 64), "mlp") for i in range(2) for name in "gu"}
    experts |= {f"e.{i}.d.weight": ((64, 96), "mlp") for i in range(2)}
    assert (
        found
        == {name: one for name, one in PLAIN.items() if "mlp." not in name} | {"r.weight": ((2, 64), "whole")} | experts
    )


def test_tensors_around_the_blocks():
    assert dict(end_tensors(BASE)) == {"model.norm.weight": (64,)}
    assert dict(end_tensors(replace(BASE, final_norm=False))) == {}
    learned = replace(BASE, rope=None, position_offset=2, names=CheckpointNames(positions="p"), norm="layer")
    assert dict(end_tensors(learned)) == {"model.norm.weight": (64,), "model.norm.bias": (64,), "p.weight": (2050, 64)}
    shapes = tensor_shapes(BASE)
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == (100, 64)
    assert len(shapes) == 3 + 3 * len(PLAIN) and "lm_head.weight" not in tensor_shapes(replace(BASE, tied=True))
    assert tensor_shapes(BASE.stretched(2)) == shapes, "stretched layers have no tensors of their own"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"norm": "layer"}, "norm=layer"),
        ({"final_norm": False}, "norm=rms"),
        ({"norm_placement": "after"}, "norm placement after"),
        ({"rope": None}, "learned positions"),
        ({"window": 8}, "sliding windows"),
        ({"num_experts": 1}, "experts"),
        ({"activation": "relu"}, "activation relu"),
        ({"gated": False}, "activation silu"),
        ({"attention_softcap": 1.0}, "soft caps"),
        ({"logit_softcap": 1.0}, "soft caps"),
        ({"embedding_scale": 2.0}, "scaled embeddings"),
        ({"attention_scale": 2.0}, "scaled embeddings"),
        ({"head": HeadRows((1,), (0,), 1)}, "a trimmed vocabulary"),
    ],
)
def test_a_decoder_that_training_does_not_reproduce_is_refused_by_every_user_of_it(fields, reason):
    other = replace(BASE, **fields)
    shared = dict(method="streaming", vocab_size=100, max_positions=64, target_hidden=64, taps=(), num_heads=1, inner=0)
    streams = StreamsConfig(**shared, layers=(2,), rank=1)
    BASE.check_adaptable()
    streams.check_target(BASE)
    for refused in (
        other.check_adaptable,
        lambda: streams.check_target(other),
        lambda: AdaptedDecoder(other, "no-such-checkpoint", "cpu", 1),
    ):
        with pytest.raises(ValueError, match=f"^a model with {reason} cannot be adapted; one of Llama's or Qwen's"):
            refused()
