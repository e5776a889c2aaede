"""Mistral 7B: a Llama with a sliding window in every layer, where config.json sets one."""

from __future__ import annotations

from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig
from parallel.model.families.llama import llama

_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}


def mistral(hf: HfConfig) -> DecoderConfig:
    hf = _DEFAULTS | dict(hf)
    return llama(hf).with_window(hf["sliding_window"], range(hf["num_hidden_layers"]))
