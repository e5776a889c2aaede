from __future__ import annotations

import json

import pytest

from parallel.model.families.registry import read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def test_what_config_json_leaves_out():
    config = read_config(LLAMA)
    assert config.head_dim == 8 and config.max_positions == 2048 and not config.tied
    assert config.rope.rope_type == "default" and config.rope.rope_theta == 10000.0
    mistral = read_config(LLAMA | {"architectures": ["MistralForCausalLM"]})
    assert mistral.window == 4096 and mistral.windowed == {0, 1, 2} and not mistral.qkv_bias
    qwen2 = read_config(LLAMA | {"architectures": ["Qwen2ForCausalLM"]})
    assert qwen2.qkv_bias and not qwen2.o_bias and qwen2.window is None
    qwen3 = read_config(LLAMA | {"architectures": ["Qwen3ForCausalLM"]})
    assert qwen3.qk_norm and qwen3.head_dim == 128 and not qwen3.qkv_bias
    gemma2 = read_config(LLAMA | {"architectures": ["Gemma2ForCausalLM"]})
    assert gemma2.windowed == {0, 2} and gemma2.attention_softcap == 50 and gemma2.logit_softcap == 30 and gemma2.tied
    assert gemma2.attention_scale == 1 / 16 and gemma2.embedding_scale == 8 and gemma2.head_dim == 256
    gemma3 = read_config(LLAMA | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7})
    assert gemma3.windowed == {0, 1, 2, 3, 4, 6} and gemma3.attention_softcap is None and gemma3.logit_softcap is None
    assert gemma3.rope.rope_theta == 1e6 and gemma3.local_rope.rope_theta == 1e4
    mixtral = read_config(LLAMA | {"architectures": ["MixtralForCausalLM"]})
    assert mixtral.num_experts == 8 and mixtral.window is None and mixtral.rope.rope_theta == 1e6
    opt = read_config(LLAMA | {"architectures": ["OPTForCausalLM"], "ffn_dim": 96})
    assert opt.rope is None and opt.max_positions == 2048 and opt.num_kv_heads == 8 and opt.tied and opt.qkv_bias


def test_windows_of_single_layers():
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "use_sliding_window": True}
    assert read_config(qwen | {"max_window_layers": 2}).windowed == {2}
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert read_config(qwen | {"layer_types": kinds}).windowed == {0}
    assert read_config(qwen | {"max_window_layers": 28}).window is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; use one of LlamaForCausalLM"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type='longrope' is not supported; use one of default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"architectures": ["OPTForCausalLM"]}, "lacks ffn_dim"),
        ({"architectures": ["OPTForCausalLM"], "ffn_dim": 96, "word_embed_proj_dim": 32}, "word_embed_proj_dim=32 is"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": None}, "lacks num_local_experts"),
        (QWEN3_MOE | {"mlp_only_layers": [1]}, "mlp_only_layers="),
    ],
)
def test_what_we_cannot_run_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(LLAMA | change)


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not readable as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="no JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == read_config(str(tmp_path / "config.json"))


def test_ranks_that_do_not_fit():
    config = read_config(LLAMA)
    for size in (1, 2, 4, 8):
        config.check_ranks(size)
    assert [config.local_kv_heads(size) for size in (1, 2, 4)] == [2, 1, 1]
    with pytest.raises(ValueError, match="tp=3 must divide num_attention_heads=8"):
        config.check_ranks(3)
    with pytest.raises(ValueError, match="num_attention_heads=8 and num_experts=4"):
        read_config(LLAMA | QWEN3_MOE).check_ranks(8)
    with pytest.raises(ValueError, match="tp=2 must divide num_key_value_heads=3"):
        read_config(LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3}).check_ranks(2)
