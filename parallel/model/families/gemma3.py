"""Gemma 3, text only (arXiv 2503.19786): Gemma 2 with a norm on every query and key head in place of attention's soft
cap, five windowed layers to a global one, and a rotary base of its own for each kind."""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig, read_rope, sliding_layers
from parallel.model.families.gemma2 import gemma2

_DEFAULTS = {"max_position_embeddings": 131072, "final_logit_softcapping": None}


def gemma3(hf: HfConfig) -> DecoderConfig:
    hf = _DEFAULTS | dict(hf)
    ropes = hf.get("rope_parameters") or {}
    around = {"rope_theta": hf.get("rope_theta", 1e6)} | (ropes.get("full_attention") or hf.get("rope_scaling") or {})
    near = {"rope_theta": hf.get("rope_local_base_freq", 1e4)} | (ropes.get("sliding_attention") or {})
    config = gemma2(hf | {"rope_parameters": around})
    config = replace(config, qk_norm=True, attention_softcap=None, local_rope=read_rope(hf, near))
    by_pattern = [i for i in range(config.num_layers) if (i + 1) % hf.get("sliding_window_pattern", 6)]
    return config.with_window(hf.get("sliding_window", 4096), sliding_layers(hf, by_pattern))
