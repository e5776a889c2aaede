"""The supported model families, and config.json read by the one it names. A family is a file here and a row below."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from parallel.model.checkpoint import read_json
from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig, refuse
from parallel.model.families.gemma import gemma2, gemma3
from parallel.model.families.llama import llama
from parallel.model.families.mistral import mistral, mixtral
from parallel.model.families.opt import opt
from parallel.model.families.qwen import qwen2, qwen3, qwen3_moe
from parallel.model.quantization import read_quantization

FAMILIES: dict[str, Callable[[HfConfig], DecoderConfig]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "OPTForCausalLM": opt,
}
"""Architecture, as config.json names it -> the function that reads that file."""


def read_config(source: str | Path | HfConfig) -> DecoderConfig:
    """Read a checkpoint directory, its config.json, or that file's content; ValueError if the engine cannot run it."""
    if isinstance(source, str | Path):
        path = Path(source)
        source = read_json(path / "config.json" if path.is_dir() else path)
    hf: HfConfig = source
    architecture = (hf.get("architectures") or [None])[0]
    if architecture not in FAMILIES:
        raise ValueError(f"architecture {architecture!r} is not supported; use one of {', '.join(FAMILIES)}")
    read_quantization(hf)  # refuses what cannot be read
    refuse(hf, "use_bidirectional_attention")
    config = FAMILIES[architecture](hf)
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"num_key_value_heads={config.num_kv_heads} must divide {config.num_heads} query heads")
    return config
