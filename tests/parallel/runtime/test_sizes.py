"""How many slots are left of a device's bytes, and in which types matrices are stored: by the numbers alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from parallel.comm.group import SINGLE
from parallel.runtime import kv_sizing, model_bytes
from parallel.runtime.kv_sizing import DeviceShare, affordable_slots, choose_kv_dtype, choose_weights
from parallel.runtime.model_bytes import dtype_name, kv_item_bytes, weights_name


@pytest.fixture
def free(monkeypatch):
    """Bytes of a device: free, and in all."""
    room = SimpleNamespace(free=1000, total=1000)
    monkeypatch.setattr(kv_sizing, "free_bytes", lambda device: room.free)
    monkeypatch.setattr(kv_sizing, "total_bytes", lambda device: room.total)
    return room


@pytest.mark.parametrize(
    ("device", "weights", "per_slot", "options", "slots"),
    [
        ("cuda:0", 400, 10, {}, 51),  # 0.85 of 600
        ("cpu", 400, 10, {}, 15),  # a quarter of 600
        ("cuda:0", 400, 10, {"most": 7}, 7),
        ("cuda:0", 400, 10, {"reserved": 100}, 42),
        ("cuda:0", 400, 10, {"num_slots": 60}, 60),
        ("cuda:0", 400, 10, {"num_slots": 61}, None),
        ("cuda:0", 990, 10, {}, 0),
        ("cuda:0", 991, 10, {}, None),
        ("cuda:0", 400, 10, {"sharing": DeviceShare(100, 0.5)}, 21),  # of (1000 - 400 - 100) / 2
        ("cuda:0", 400, 10, {"sharing": DeviceShare(100, 0.5), "reserved": 50}, 17),
        ("cuda:0", 400, 10, {"sharing": DeviceShare(0, 2.0)}, 51),  # no more than what is free
        ("cuda:0", 400, 0, {}, 100),
    ],
)
def test_slots_that_are_left(free, device, weights, per_slot, options, slots):
    def found():
        return affordable_slots("m", SINGLE, device, weights, per_slot, **{"most": 100} | options)

    if slots is not None:
        assert found() == slots
        return
    with pytest.raises(ValueError, match=r"^m: 0\.00 GiB of weights and 0\.00 GiB of KV do not fit the 0\.00 GiB free"):
        found()


def test_what_does_not_fit_is_said_in_gib(free):
    free.free = 5 * 2**30
    line = r"^m: 4\.00 GiB of weights and 2\.00 GiB of KV do not fit the 5\.00 GiB free on cpu; use more ranks"
    with pytest.raises(ValueError, match=line):
        affordable_slots("m", SINGLE, "cpu", 4 * 2**30, 2**30, most=9, num_slots=2)


def test_ranks_take_the_least_number(free):
    class Pair:
        size = 2

        def all_gather(self, tensor):
            return torch.cat((tensor, tensor - 3))

    pair: Any = Pair()
    assert affordable_slots("m", pair, "cpu", 400, 10, most=100) == 12
    assert affordable_slots("m", pair, "cpu", 400, 10, most=100, num_slots=9) == 9, "given, it is the same on all"


def test_free_memory_is_the_devices_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11 + device.index, 22))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=33))
    assert (kv_sizing.free_bytes("cuda:3"), kv_sizing.total_bytes("cuda:3"), kv_sizing.free_bytes("cpu")) == (
        14,
        22,
        33,
    )


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [("auto", "cpu", "float32"), ("auto", "cuda:1", "bfloat16"), ("float16", "cpu", "float16")],
)
def test_types_of_numbers(name, device, expected):
    assert dtype_name(name, device) == expected
    with pytest.raises(ValueError, match="dtype=int8: unknown; use auto, float32, bfloat16, float16"):
        dtype_name("int8", device)


def test_types_of_rows():
    assert choose_kv_dtype("auto", torch.float16) == torch.float16
    assert choose_kv_dtype("fp8", torch.float16) == torch.float8_e4m3fn
    assert (kv_item_bytes("fp8", "float32"), kv_item_bytes("auto", "float32"), kv_item_bytes("auto", "float16")) == (
        1,
        4,
        2,
    )


@pytest.mark.parametrize(
    ("asked", "dtype", "device", "quantised", "bf16", "kernels", "expected"),
    [
        ("auto", "float32", "cpu", False, False, True, "float32"),
        ("auto", "float32", "cpu", False, True, True, "bfloat16"),
        ("auto", "float32", "cpu", False, True, False, "float32"),
        ("auto", "bfloat16", "cpu", False, True, True, "bfloat16"),
        ("auto", "float16", "cpu", False, True, True, "float16"),
        ("auto", "bfloat16", "cuda:0", True, False, True, "packed"),
        ("auto", "bfloat16", "cuda:0", True, False, False, "bfloat16"),
        ("auto", "float16", "cuda:0", False, True, True, "float16"),
        ("packed", "float16", "cuda:0", True, False, True, "packed"),
        ("int8", "float32", "cpu", False, False, True, "int8"),
        ("bfloat16", "float32", "cpu", False, False, False, "bfloat16"),
        ("float16", "float16", "cuda:0", True, False, True, "float16"),
        ("packed", "float16", "cuda:0", False, False, True, "is not quantised"),
        ("packed", "float16", "cuda:0", True, False, False, "needs a CUDA device"),
        ("w8a8", "float32", "cpu", False, True, True, "w8a8"),
        ("w8a8", "bfloat16", "cpu", True, False, False, "w8a8"),
        ("int8", "float32", "cuda:0", False, False, True, "needs a CPU"),
        ("int8", "bfloat16", "cpu", False, False, True, "needs a CPU and dtype=float32;"),
        ("w8a8", "bfloat16", "cuda:0", False, False, True, "needs a CPU"),
        ("w8a8", "float16", "cpu", False, False, True, "needs a CPU and dtype=float32 or bfloat16"),
        ("int8", "float16", "cpu", False, False, True, "needs a CPU"),
    ],
)
def test_types_of_matrices(monkeypatch, asked, dtype, device, quantised, bf16, kernels, expected):
    monkeypatch.setattr(model_bytes, "resolve_checkpoint", lambda path: path)
    monkeypatch.setattr(model_bytes, "quantization_of", lambda directory: "some" if quantised else None)
    monkeypatch.setattr(model_bytes, "stores_bfloat16", lambda directory, config: bf16)
    monkeypatch.setattr(model_bytes, "read_config", lambda directory: None)
    if " " in expected:
        with pytest.raises(ValueError, match=f"weights={asked}: .*{expected}"):
            weights_name(asked, dtype, device, "path", has_kernels=kernels)
        return
    assert weights_name(asked, dtype, device, "path", has_kernels=kernels) == expected
    may_round = asked == "auto" and dtype == "float32" and expected == "bfloat16"
    rounded = weights_name(asked, dtype, device, "path", has_kernels=kernels, rounds=True)
    assert rounded == ("int8" if may_round else expected)
    if asked == "auto":
        assert weights_name(asked, dtype, device, "", has_kernels=kernels) == dtype, "of no checkpoint nothing is known"


@pytest.mark.parametrize(
    ("weights", "device", "triton", "cpp", "has_kernels"),
    [
        ("auto", "cpu", False, True, True),
        ("auto", "cpu", True, False, False),
        ("auto", "cuda:0", True, False, True),
        ("packed", "cpu", True, False, True),
        ("packed", "cpu", False, True, False),
    ],
)
def test_which_kernels_matter_depends_on_the_matrices(monkeypatch, weights, device, triton, cpp, has_kernels):
    asked = []

    def name(*place, **options):
        asked.append((place, options))
        return "packed" if weights == "packed" else "int8"

    monkeypatch.setattr(kv_sizing, "runs_on", lambda one: triton)
    monkeypatch.setattr(kv_sizing, "has_products", lambda: cpp)
    monkeypatch.setattr(kv_sizing, "weights_name", name)
    found = choose_weights(weights, "auto", device, "path", rounds=True)
    assert found == ("packed" if weights == "packed" else torch.int8)
    dtype = "bfloat16" if device == "cuda:0" else "float32"
    assert asked == [((weights, dtype, device, "path"), {"has_kernels": has_kernels, "rounds": True})]
