"""A checkpoint as a GGUF file of float32 tensors, for llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cluster.tools.bench.peers.hf_transformers import load_model

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `model_type` whose blocks are those of llama.cpp's model of the same name."""


def write_gguf(checkpoint: str, file: Path, stretch: int = 0) -> None:
    """Raises ValueError, one line, for a checkpoint of another family."""
    import gguf  # pyright: ignore[reportMissingImports] (the user's to install)

    model = load_model(checkpoint, "float32", stretch=stretch)
    config = model.config
    check_family("llama-cpp", checkpoint, config)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    writer = gguf.GGUFWriter(file, config.model_type)
    heads, head_dim = config.num_attention_heads, head_dim_of(config)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokens(writer, config)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        projection = key.split(".")[-2]
        if config.model_type == "llama" and projection in ("q_proj", "k_proj"):
            values = interleaved(values, heads if projection == "q_proj" else config.num_key_value_heads)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_family(peer: str, checkpoint: str, config: Any) -> None:
    """Raise ValueError, one line, for a model that is more than blocks of attention and a gated MLP with plain RoPE."""
    kind, rope = config.model_type, config.rope_parameters.get("rope_type", "default")
    if kind not in FAMILIES or rope != "default":
        remedy = f"job.peers={peer} takes {', '.join(FAMILIES)} with plain RoPE; drop it"
        raise ValueError(f"{checkpoint}: model_type={kind} with rope_type={rope}; {remedy}")


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def interleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head in llama.cpp's order: its `llama` rotates neighbouring rows where others rotate halves."""
    halves = values.reshape(num_heads, 2, len(values) // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_tokens(writer: Any, config: Any) -> None:
    """A vocabulary of the tokens' numbers, `<17>`: prompts come as ids, and answers give theirs as text.

    The tokens' own texts would not: those that are no whole characters are joined or dropped.
    """
    import gguf  # pyright: ignore[reportMissingImports] (the user's to install)

    types = [gguf.TokenType.NORMAL] * config.vocab_size
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if ends[0] is not None:
        writer.add_eos_token_id(ends[0])
        types[ends[0]] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{index}>" for index in range(config.vocab_size)])
    writer.add_token_types(types)
    writer.add_token_merges(["< >"])  # llama.cpp refuses a file without one
    writer.add_add_bos_token(False)
