"""The precision of passes in training: bfloat16 where the device has instructions for it."""

from __future__ import annotations

import torch


def fast_dtype(device: str) -> torch.dtype:
    """bfloat16, or float32 on CPUs that oneDNN computes no bfloat16 on (without AVX-512): there it is several times as
    slow."""
    has_bfloat16 = torch.device(device).type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def fast_passes(device: str) -> torch.autocast:
    """Context in which float32 weights are computed with in that precision."""
    dtype = fast_dtype(device)
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype is torch.bfloat16)
