"""Passes of training are computed in bfloat16 only where the device has instructions for it."""

from __future__ import annotations

import pytest
import torch

from parallel.training.precision import fast_dtype, fast_passes


@pytest.mark.parametrize(("has_it", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_without_bfloat16_computes_in_float32(monkeypatch: pytest.MonkeyPatch, has_it: bool, dtype: torch.dtype):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_it)
    with fast_passes("cpu"):
        product = torch.nn.Linear(4, 4)(torch.ones(2, 4))
    assert product.dtype is fast_dtype("cpu") is dtype
    assert fast_dtype("cuda") is torch.bfloat16
