from __future__ import annotations

import json

import pytest
import transformers

from parallel.model.families.registry import read_config
from tests.families import FAMILIES

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


def shape_of(family, **changes):
    """The least that a config.json of this family says, and what transformers completes it to."""
    qwen2_moe = QWEN3_MOE | {"shared_expert_intermediate_size": 40}
    needed = {"OPT": {"ffn_dim": 96}, "Qwen2Moe": qwen2_moe, "Qwen3Moe": QWEN3_MOE}.get(family, {})
    bare = LLAMA | needed | changes | {"architectures": [f"{family}ForCausalLM"]}
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    return bare, config_class(**bare).to_dict()


@pytest.mark.parametrize(
    ("family", "changes"),
    [(family, {}) for family in FAMILIES]
    + [(family, {"use_sliding_window": True, "num_hidden_layers": 30}) for family in ("Qwen2", "Qwen3", "Qwen3Moe")],
)
def test_what_config_json_leaves_out_is_what_transformers_takes_for_it(family, changes):
    bare, complete = shape_of(family, **changes)
    if family == "Gemma3":
        bare["num_hidden_layers"] = complete["num_hidden_layers"] = 7
        del complete["layer_types"]
    assert read_config(bare) == read_config(complete)


def test_fields_that_transformers_derives():
    gemma = read_config(shape_of("Gemma2")[0])
    assert gemma.attention_scale == 1 / 16 and gemma.embedding_scale == 8 and gemma.windowed == {0, 2}
    gemma = read_config(shape_of("Gemma3", num_hidden_layers=7)[0])
    assert gemma.attention_softcap is None and gemma.windowed == {0, 1, 2, 3, 4, 6}
    assert read_config(LLAMA).head_dim == 8 and read_config(LLAMA).windowed == frozenset()


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
        ({"hidden_act": "gelu_new"}, "hidden_act='gelu_new'"),
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
        (QWEN3_MOE | {"mlp_only_layers": [*range(40)]}, "leave no layer with experts"),
    ],
)
def test_what_we_cannot_run_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(LLAMA | change)


def test_the_frequencies_of_llama3_are_a_range():
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "high_freq_factor": 2.0}
    for low in (2.0, 4.0):
        with pytest.raises(ValueError, match=r"high_freq_factor=2\.0: must be above low_freq_factor; correct it"):
            read_config(LLAMA | {"rope_scaling": rope | {"low_freq_factor": low}})
    kept = read_config(LLAMA | {"rope_scaling": rope | {"low_freq_factor": 1.0}}).rope
    assert kept is not None and (kept.low_freq_factor, kept.high_freq_factor) == (1.0, 2.0)
    plain = {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}
    assert read_config(LLAMA | {"rope_scaling": plain}), "fields of another type are not read"


@pytest.mark.parametrize("said", [True, False])
def test_qwen2_has_biases_on_queries_keys_and_values_alone(said):
    """Whatever `attention_bias` says, which its config.json does not have: the code of the model does not read it."""
    config = read_config(LLAMA | {"architectures": ["Qwen2ForCausalLM"], "attention_bias": said})
    assert (config.qkv_bias, config.o_bias) == (True, False)


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
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
    with pytest.raises(
        ValueError, match=r"^tp=3: ranks cannot share num_attention_heads=8, .* evenly; use one of 1, 2, 4, 8$"
    ):
        config.check_ranks(3)
    with pytest.raises(ValueError, match="num_attention_heads=8, .* and num_experts=4"):
        read_config(LLAMA | QWEN3_MOE).check_ranks(8)
    with pytest.raises(ValueError, match=r"^tp=2: .*num_key_value_heads=3 .* use one of 1, 3, 6$"):
        read_config(LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3}).check_ranks(2)
