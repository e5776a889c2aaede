"""Qwen 3: Qwen 2 without its biases and with an RMSNorm on every query and key head."""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import DecoderConfig
from parallel.model.families.fields import HfConfig
from parallel.model.families.qwen2 import qwen2


def qwen3(hf: HfConfig) -> DecoderConfig:
    hf = {"head_dim": 128} | dict(hf)
    bias = bool(hf.get("attention_bias", False))
    return replace(qwen2(hf), qkv_bias=bias, o_bias=bias, qk_norm=True)
