from __future__ import annotations

import pytest
import torch

from parallel.kv.pass_plan import Span
from parallel.model.families import registry
from parallel.model.families.registry import read_config
from parallel.runtime.runner import open_model
from tests.families import FAMILIES, LIKE_OTHERS
from tests.matrices import in_turn
from tests.parallel.backends import BACKENDS, EVERY_BACKEND

TOKENS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1)).tolist()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1000.0,
}
MODELS = {family: (family, overrides) for family, overrides in FAMILIES.items()} | {
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama, as many KV heads": ("Llama", {"num_key_value_heads": 4, "head_dim": None}),
    "Llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "Llama, yarn rope": ("Llama", {"rope_parameters": YARN}),
    "Llama, linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}),
    "Llama, dynamic rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e3}}),
    "Mistral, no window": ("Mistral", {}),
    "Qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen3, no biases": ("Qwen3", {}),
    "Gemma2, no caps": (
        "Gemma2",
        FAMILIES["Gemma2"] | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "Gemma3, older": ("Gemma3", {"num_hidden_layers": 7, "sliding_window": 8, "final_logit_softcapping": 20.0}),
    "OPT, norms after": ("OPT", FAMILIES["OPT"] | {"do_layer_norm_before": False}),
    "OPT, no biases": ("OPT", FAMILIES["OPT"] | {"enable_bias": False, "tie_word_embeddings": False}),
    "Qwen3Moe, dense layers": (
        "Qwen3Moe",
        FAMILIES["Qwen3Moe"] | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "Qwen3Moe, raw weights": ("Qwen3Moe", FAMILIES["Qwen3Moe"] | {"norm_topk_prob": False}),
}


def test_every_family_has_a_row():
    assert {f"{family}ForCausalLM" for family in FAMILIES} == set(registry.FAMILIES)


def feed(model, chunks):
    """Logits of TOKENS fed to a fresh sequence in the given chunks; the first half of them is committed."""
    model.open(0)
    logits, start = [], 0
    for i, size in enumerate(chunks):
        logits.append(model.forward([Span(0, size, num_logits=size)], TOKENS[start : start + size]).logits)
        if i == len(chunks) // 2:
            model.commit(0, range(model.pool.pending_len(0)))
        start += size
    model.close(0)
    return torch.cat(logits)


@pytest.mark.parametrize(("name", "backend"), list(in_turn(MODELS, EVERY_BACKEND)))
def test_logits_are_those_of_transformers(make_checkpoint, name, backend):
    family, overrides = MODELS[name]
    checkpoint = make_checkpoint(family, **overrides)
    model = open_model(checkpoint.path, num_slots=64, backend=backend)
    expected = checkpoint.logits(TOKENS)
    assert expected.std() > 0.5, "weights too weak for the comparison to mean anything"
    for chunks in ([40], [7, 20, 13], [30] + [1] * 10):
        torch.testing.assert_close(feed(model, chunks), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *in_turn(FAMILIES, [2], times=LIKE_OTHERS),
        ("Llama, biases", 4),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("Mistral", "Qwen3Moe")),
    ],
)
def test_ranks_share_a_model(make_checkpoint, on_ranks, name, size):
    """97 tokens of vocabulary are odd for every size, and 4 ranks share 2 KV heads."""
    family, overrides = MODELS[name]
    checkpoint = make_checkpoint(family, **overrides)
    expected = checkpoint.logits(TOKENS)

    def work(group):
        models = [open_model(checkpoint.path, group, num_slots=64, backend=backend) for backend in BACKENDS]
        return [feed(model, [30, 9, 1]) for model in models]

    for results in on_ranks(size, work):
        for logits in results:
            assert logits.shape == expected.shape
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", list(in_turn(FAMILIES, times=LIKE_OTHERS)))
def test_greedy_tokens_are_those_of_transformers(make_checkpoint, family):
    checkpoint = make_checkpoint(family, **FAMILIES[family])
    model = open_model(checkpoint.path, num_slots=64)
    model.open(0)
    tokens = TOKENS[:20]
    logits = model.forward([Span(0, 20)], tokens).logits
    for _ in range(10):
        tokens = [*tokens, int(logits.argmax(-1))]
        logits = model.forward([Span(0, 1)], tokens[-1:]).logits
    expected = checkpoint.model.generate(
        torch.tensor([TOKENS[:20]]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert tokens == expected[0].tolist()


def test_taps_are_the_residual_stream(llama):
    model = open_model(llama.path, num_slots=64)
    model.open(0)
    output = model.forward([Span(0, 40)], TOKENS, taps=(2, 0, 1))
    with torch.no_grad():
        reference = llama.model.model(torch.tensor([TOKENS]), output_hidden_states=True)
    after_two, embedded, after_one = output.features
    torch.testing.assert_close(embedded, reference.hidden_states[0][0])
    torch.testing.assert_close(after_one, reference.hidden_states[1][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(output.hidden, reference.last_hidden_state[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(model.decoder.norm(after_two), output.hidden)


def test_stretched_layers_cost_but_change_nothing(make_checkpoint):
    checkpoint = make_checkpoint("Qwen3", attention_bias=True, tie_word_embeddings=True)
    plain = open_model(checkpoint.path, num_slots=64)
    stretched = open_model(checkpoint.path, num_slots=64, stretch=3)
    assert len(stretched.decoder.layers) == 5 and stretched.pool.keys.shape[0] == 5
    assert torch.equal(feed(stretched, [20, 20]), feed(plain, [20, 20]))
    last, copy = plain.decoder.layers[-1], stretched.decoder.layers[-1]
    x = torch.randn(4, 32)
    assert torch.equal(copy.mlp.gate_up(x), last.mlp.gate_up(x)) and copy.mlp.gate_up(x).any()
    assert not copy.mlp(x).any() and not copy.attention.o(torch.randn(4, 48)).any()


def test_a_stretched_layer_keeps_the_last_layers_window():
    hf = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1}
    hf |= {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    assert read_config(hf).stretched(2).windowed == {1, 2, 3}


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "OPT", "Mixtral"])
def test_bfloat16_runs_close_to_float32(make_checkpoint, family):
    checkpoint = make_checkpoint(family, **FAMILIES[family] | {"initializer_range": 0.1, "init_std": 0.1})
    low = feed(open_model(checkpoint.path, dtype=torch.bfloat16, num_slots=64), [30, 10])
    assert low.dtype == torch.float32
    expected = checkpoint.logits(TOKENS)
    assert (low - expected).std() < 0.1 * expected.std()
