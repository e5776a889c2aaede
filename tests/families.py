"""One tiny random model for every architecture of the registry. A new family adds a row; every family test runs it."""

from __future__ import annotations

from typing import Any

import torch
import transformers

WINDOW = 8
_MIXTURE = {"num_experts_per_tok": 2, "initializer_range": 0.5}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Mixtral": {"sliding_window": WINDOW, "num_local_experts": 4} | _MIXTURE,
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen3": {"attention_bias": True, "tie_word_embeddings": True},
    "Qwen2Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
    }
    | _MIXTURE
    | {"initializer_range": 0.3},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True} | _MIXTURE,
    "Gemma2": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 10.0,
        "tie_word_embeddings": True,
    },
    "Gemma3": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 3,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        },
        "tie_word_embeddings": True,
    },
    "OPT": {"ffn_dim": 48, "init_std": 0.3, "tie_word_embeddings": True},
}
"""Family, as transformers names it -> what differs from the shape that a test gives all of them. Sliding windows are
shorter than the tests' prompts."""
LIKE_OTHERS = dict.fromkeys(("Mistral", "Mixtral", "Qwen2", "Gemma2"), 0)
"""For matrices of `tests/matrices.py`: families whose layers others have too. By default, they are compared with
transformers and in passes of trees, and that is enough."""


_STACKS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "init_std": 0.3,
}
_T5 = {
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "initializer_factor": 2.0,
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "Marian": _STACKS | {"scale_embedding": True, "activation_function": "swish", "decoder_start_token_id": 2},
    "Bart": _STACKS | {"decoder_start_token_id": 1},
    "T5": _T5,
}
"""Families with an encoder: their whole shape but for the vocabulary and the number of positions."""
_MODELS = {"Marian": "MarianMTModel", "Bart": "BartForConditionalGeneration", "T5": "T5ForConditionalGeneration"}


def tiny_encoder_decoder(family: str, seed: int, **shape: Any) -> Any:
    """A model of transformers with random weights, strong ones, whose outputs repeat little. The end token is 0."""
    ends = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0, "forced_eos_token_id": 0}
    torch.manual_seed(seed)
    shape, family = ends | ENCODER_DECODERS[family] | shape, family.partition(" ")[0]
    if family == "T5":
        shape["n_positions"] = shape.pop("max_position_embeddings")
    config = getattr(transformers, f"{family}Config")(**shape)
    model = getattr(transformers, _MODELS[family])(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms start at one and biases at zero, which would hide a missing one
                parameter.copy_((not name.endswith("bias")) + 0.3 * torch.randn_like(parameter))
        if (bias := getattr(model, "final_logits_bias", None)) is not None:
            bias.normal_()
    return model


def tiny_model(family: str, seed: int, **shape: Any) -> Any:
    """A model of transformers with random weights."""
    if family in ENCODER_DECODERS:
        return tiny_encoder_decoder(family, seed, **shape)
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config_class(**shape)).eval()
    model.set_attn_implementation("eager")  # up to transformers 5.17, "sdpa" leaves out Gemma 2's soft cap
    return model
