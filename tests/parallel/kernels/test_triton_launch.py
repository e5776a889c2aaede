"""Tests of where Triton's kernels run, and with what they are launched."""

from __future__ import annotations

import importlib.util
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.kernels import triton_launch
from parallel.kernels.triton_launch import block_size, gated, has_triton, launch, rms_norm, runs_on


@pytest.mark.parametrize(
    ("switch", "installed", "interprets", "compilers", "expected"),
    [
        (None, True, False, {"gcc"}, True),
        ("1", True, False, {"clang"}, True),
        (None, True, False, {"cc"}, True),
        (None, True, False, {"mine"}, True),
        (None, True, False, set(), False),
        (None, True, True, set(), True),
        (None, False, True, {"gcc"}, False),
        ("0", True, True, {"gcc"}, False),
    ],
)
def test_triton_needs_a_compiler_of_c_and_may_be_switched_off(
    monkeypatch, switch, installed, interprets, compilers, expected
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(triton_launch, "INTERPRETS", interprets)
    monkeypatch.setenv("CC", "mine")
    monkeypatch.delenv(triton_launch.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(triton_launch.SWITCH, switch)
    assert has_triton.__wrapped__() == expected


@pytest.mark.parametrize(
    ("device", "has", "interprets", "expected"),
    [
        ("cuda", True, False, True),
        ("meta", True, False, True),
        ("cpu", True, False, False),
        ("cpu", True, True, True),
        ("cuda", False, True, False),
    ],
)
def test_kernels_take_tensors_of_a_gpu_and_of_any_device_in_the_interpreter(
    monkeypatch, device, has, interprets, expected
):
    monkeypatch.setattr(triton_launch, "has_triton", lambda: has)
    monkeypatch.setattr(triton_launch, "INTERPRETS", interprets)
    assert runs_on(torch.device(device)) == expected


class Kernel:
    """Notes what it is launched with."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.calls.append((grid, arguments, options))


@pytest.mark.parametrize("interprets", [False, True])
def test_a_kernel_is_launched_where_there_is_something_to_do(monkeypatch, interprets):
    monkeypatch.setattr(triton_launch, "INTERPRETS", interprets)
    kernel, x = Kernel(), torch.zeros(3)
    launch(kernel, (2, 1), x, 7, BLOCK=16)
    launch(kernel, (2, 0), x)
    launch(kernel, (2, 1), torch.zeros(3, device="meta"))
    assert kernel.calls == [((2, 1), (x, 7), {"BLOCK": 16})]


@pytest.mark.parametrize(
    ("size", "block"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (1024, 1024), (1025, 2048)]
)
def test_a_block_is_the_power_of_two_that_holds_a_row(size, block):
    assert block_size(size) == block
    assert block_size(size, least=1) == (block if size > 8 else 1)


@pytest.fixture
def launched(monkeypatch):
    calls: Any = []
    monkeypatch.setattr(
        triton_launch, "launch", lambda kernel, grid, *arguments, **options: calls.append((grid, arguments, options))
    )
    return calls


@pytest.mark.parametrize(("size", "num_warps"), [(16, 4), (2048, 4), (2049, 8), (4096, 8), (8192, 16), (32768, 16)])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_is_launched_for_every_row(launched, size, num_warps, adds, offset):
    x = torch.zeros(2, 3, size)
    total, out = rms_norm(x, torch.ones(size), 1e-5, offset, x if adds else None)
    ((grid, arguments, options),) = launched
    assert grid == (6,) and arguments[5:] == (size, 1e-5) and out.shape == x.shape
    assert (total is x) != adds and arguments[3] is total and arguments[4] is out
    assert options == dict(ADDS=adds, PLUS_ONE=offset == 1.0, BLOCK=block_size(size), num_warps=num_warps)


@pytest.mark.parametrize(("size", "grid", "block"), [(5, (2, 1), 16), (1024, (2, 1), 1024), (1025, (2, 2), 1024)])
def test_gates_are_launched_in_blocks(launched, size, grid, block):
    out = gated(torch.zeros(2, 2 * size))
    ((found, arguments, options),) = launched
    assert found == grid and out.shape == (2, size) and arguments[1:] == (out, size) and options == {"BLOCK": block}


def test_only_offsets_of_norms_are_taken():
    with pytest.raises(AssertionError):
        rms_norm(torch.zeros(1, 16), torch.ones(16), 1e-5, 0.5)


def test_the_first_argument_of_a_launch_is_a_tensor():
    with pytest.raises(AssertionError):
        launch(SimpleNamespace(), (1,), 3)
