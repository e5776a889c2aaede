"""Masked-diffusion language models that fill blocks: SDAR (arXiv 2510.06303) and TraDo, which has its layout.

Their weights are those of Qwen 3; what differs is which rows see each other, and that a masked row predicts its own
token.
"""

from __future__ import annotations

from dataclasses import replace

from parallel.model.config import DecoderConfig, MaskedDiffusion
from parallel.model.families.fields import HfConfig
from parallel.model.families.qwen import qwen3, qwen3_moe

_BLOCK, _MASK = 4, 151669
"""What published checkpoints have, whose config.json names neither."""


def sdar(hf: HfConfig) -> DecoderConfig:
    return _filling(qwen3(hf), hf)


def sdar_moe(hf: HfConfig) -> DecoderConfig:
    return _filling(qwen3_moe(hf), hf)


def _filling(config: DecoderConfig, hf: HfConfig) -> DecoderConfig:
    mask_token, block_size = hf.get("mask_token_id"), hf.get("block_size") or _BLOCK
    mask_token = _MASK if mask_token is None else mask_token
    if mask_token >= config.vocab_size:
        raise ValueError(f"mask_token_id={mask_token}: is none of {config.vocab_size} tokens; correct config.json")
    if config.window is not None:
        raise ValueError("use_sliding_window: blocks that are filled see the whole text; correct config.json")
    return replace(config, diffusion=MaskedDiffusion(mask_token, block_size))
