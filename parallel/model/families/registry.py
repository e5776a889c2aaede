"""The supported model families, and config.json read by the one it names, whose module alone is loaded.

A family is a file here and a row below.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from parallel.model.config import DecoderConfig
from parallel.model.config_fields import check_fields, read_config_file
from parallel.model.families.fields import HfConfig, architecture_of, refuse
from parallel.model.quantization import read_quantization

FAMILIES = {
    "LlamaForCausalLM": ("llama", "llama"),
    "MistralForCausalLM": ("mistral", "mistral"),
    "MixtralForCausalLM": ("mistral", "mixtral"),
    "Qwen2ForCausalLM": ("qwen", "qwen2"),
    "Qwen3ForCausalLM": ("qwen", "qwen3"),
    "Qwen2MoeForCausalLM": ("qwen", "qwen2_moe"),
    "Qwen3MoeForCausalLM": ("qwen", "qwen3_moe"),
    "Gemma2ForCausalLM": ("gemma", "gemma2"),
    "Gemma3ForCausalLM": ("gemma", "gemma3"),
    "OPTForCausalLM": ("opt", "opt"),
}
"""Architecture, as config.json names it -> the module here, and its function that reads that file."""
ENCODER_DECODERS = {
    "BartForConditionalGeneration": ("bart", "bart"),
    "MarianMTModel": ("bart", "marian"),
    "T5ForConditionalGeneration": ("t5", "t5"),
}
"""The same for those with an encoder."""
DIFFUSION = {
    "SDARForCausalLM": ("diffusion", "sdar"),
    "SDARMoeForCausalLM": ("diffusion", "sdar_moe"),
    "LLaDAModelLM": ("diffusion", "llada"),
    "DreamModel": ("diffusion", "dream"),
}
"""The same for those that fill masks."""
MOST_EXPERTS = 2**17
"""Limit for all layers together, four times the experts of the largest published model."""


def read_config(source: str | Path | HfConfig) -> DecoderConfig:
    """Read the config.json of a checkpoint directory, or that file's content; ValueError, one line, if it is damaged or
    the engine cannot run it."""
    if isinstance(source, str | Path):
        hf: HfConfig = read_config_file(Path(source))
    else:
        hf = source
        check_fields(hf)
    architecture = architecture_of(hf)
    families = FAMILIES | ENCODER_DECODERS | DIFFUSION
    if architecture not in families:
        raise ValueError(f"architecture {architecture or None!r} is not supported; use one of {', '.join(families)}")
    read_quantization(hf)  # refuses what cannot be read
    refuse(hf, "use_bidirectional_attention")
    module, function = families[architecture]
    read: Callable[[HfConfig], DecoderConfig] = getattr(import_module(f"parallel.model.families.{module}"), function)
    config = read(hf)
    for stack in (config, *([] if config.encoder is None else [config.encoder])):
        _check_together(stack)
    return config


def _check_together(config: DecoderConfig) -> None:
    """ValueError, one line, for sizes that are each in their range and make no decoder."""
    heads, experts = config.num_heads, config.num_experts
    rules = {
        f"num_key_value_heads={config.num_kv_heads} must divide {heads} query heads": heads % config.num_kv_heads == 0,
        f"num_attention_heads={heads}: is more than hidden_size={config.hidden_size}": config.head_dim > 0,
        f"head_dim={config.head_dim}: must be even": config.rope is None or config.head_dim % 2 == 0,
        f"num_experts_per_tok={config.experts_per_token}: is more than {experts}": config.experts_per_token <= experts,
        f"num_hidden_layers={config.num_layers} of {experts} experts: is too many": config.num_layers * experts
        <= MOST_EXPERTS,
    }
    for wrong, is_right in rules.items():
        if not is_right:
            raise ValueError(f"{wrong}; correct config.json, or fetch it again")
