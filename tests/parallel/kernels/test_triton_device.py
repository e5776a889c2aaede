"""The device of the tests of Triton's kernels: a GPU or the interpreter's, and never host memory."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from parallel.kernels.triton_launch import gated
from tests.parallel import triton_device
from tests.parallel.fake_accelerator import DeviceTensor


def test_a_tensor_in_host_memory_is_refused_as_on_a_gpu(device):
    assert gated(torch.ones(2, 8).to(device)).device == device
    with pytest.raises((RuntimeError, ValueError), match="cpu"):
        gated(torch.ones(2, 8))


def test_compiled_kernels_have_a_gpu_and_the_interpreter_has_its_own_device(monkeypatch):
    monkeypatch.setattr(triton_device, "has_triton", lambda: True)
    monkeypatch.setattr(triton_device, "INTERPRETS", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with ExitStack() as block:
            if has_gpu:
                assert block.enter_context(triton_device.triton_device()) == torch.device("cuda:1")
            else:
                with pytest.raises(pytest.skip.Exception):
                    block.enter_context(triton_device.triton_device())
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_device, "INTERPRETS", True)
    with triton_device.triton_device() as device:
        assert isinstance(torch.ones(2).to(device), DeviceTensor)
