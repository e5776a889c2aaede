"""Qwen 2 and 2.5: a Llama with biases on queries, keys and values; a sliding window is switched on by layer."""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig, sliding_layers
from parallel.model.families.llama import llama

_DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}


def qwen2(hf: HfConfig) -> DecoderConfig:
    hf = _DEFAULTS | dict(hf)
    config = replace(llama(hf), qkv_bias=True, o_bias=False)
    if not hf.get("use_sliding_window"):
        return config
    after_full = range(min(config.num_layers, hf["max_window_layers"]), config.num_layers)
    return config.with_window(hf["sliding_window"], sliding_layers(hf, after_full))
