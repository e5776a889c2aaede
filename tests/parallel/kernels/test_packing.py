"""How codes lie: words, groups and bytes of matrices, counted by hand."""

from __future__ import annotations

import pytest
import torch

from parallel.kernels import packed_products
from parallel.kernels.packed_products import Codes, PackedMatrix, PackedRows, can_pack
from parallel.kernels.packing import Packing


@pytest.mark.parametrize(
    ("packing", "span", "has_kernel"),
    [
        (Packing("int4"), 32, True),
        (Packing("int4", 128), 32, True),
        (Packing("int4", 48), 16, True),
        (Packing("int4", 8), 8, False),
        (Packing("int4", 31), 1, False),
        (Packing("int8"), 128, True),
        (Packing("fp8", 64), 64, True),
        (Packing("fp8"), 128, True),
    ],
)
def test_as_many_inputs_are_multiplied_at_a_time_as_a_group_allows(packing, span, has_kernel):
    assert (packing.span, packing.has_kernel) == (span, has_kernel)


@pytest.mark.parametrize(
    ("packing", "inputs", "num_words", "num_groups", "num_bytes"),
    [
        (Packing("int4", 32), 256, 32, 8, 10 * (32 * 4 + 8 * 4)),
        (Packing("int4", 32), 257, 64, 9, 10 * (64 * 4 + 9 * 4)),
        (Packing("int4", 128, has_zeros=True, scale_bytes=2), 512, 64, 4, 10 * (64 * 4 + 4 * 3)),
        (Packing("int4"), 1, 32, 1, 10 * (32 * 4 + 4)),
        (Packing("int8"), 128, 128, 1, 10 * (128 + 4)),
        (Packing("int8"), 129, 256, 1, 10 * (256 + 4)),
        (Packing("fp8", 64, scale_bytes=2), 192, 192, 3, 10 * (192 + 3 * 2)),
    ],
)
def test_words_groups_and_bytes_of_ten_outputs(packing, inputs, num_words, num_groups, num_bytes):
    assert packing.num_words(inputs) == num_words and packing.num_groups(inputs) == num_groups
    assert packing.num_bytes(10, inputs) == num_bytes


@pytest.mark.parametrize("has_zeros", [False, True])
def test_a_matrix_takes_the_bytes_that_were_counted(has_zeros):
    packing = Packing("int4", 32, has_zeros=has_zeros, scale_bytes=2)
    matrix = PackedMatrix(70, 96, packing, torch.bfloat16, "cpu")
    parts = [matrix.weights, matrix.scales, *([] if matrix.zeros is None else [matrix.zeros])]
    assert sum(part.numel() * part.element_size() for part in parts) == packing.num_bytes(70, 96)
    assert matrix.weights.untyped_storage().nbytes() == 128 * matrix.weights.shape[1] * 4, "whole tiles of 64 outputs"


@pytest.mark.parametrize(
    ("zeros", "values", "expected"),
    [
        (None, torch.tensor([[1, 15, 8]], dtype=torch.uint8), [[-14.0, 14.0, 0.0]]),
        (torch.tensor([[1, 7]], dtype=torch.uint8), torch.tensor([[1, 15, 8]], dtype=torch.uint8), [[0.0, 28.0, 3.0]]),
        (None, torch.tensor([[1, -15, 8]], dtype=torch.int8), [[2.0, -30.0, 24.0]]),
    ],
)
def test_a_number_is_its_code_less_the_zero_times_the_scale(zeros, values, expected):
    scales, groups = torch.tensor([[2.0, 3.0]]), torch.tensor([0, 0, 1])
    assert Codes(values, scales, zeros, groups).numbers().tolist() == expected


def test_one_scale_is_that_of_all_columns():
    codes = Codes(torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[3.0]]), None, torch.tensor([0, 0]))
    assert codes.numbers().tolist() == [[3.0, 6.0]]


@pytest.mark.parametrize(
    ("kind", "device", "runs", "capability", "expected"),
    [
        ("int4", "cuda", True, (7, 5), True),
        ("fp8", "cuda", True, (8, 9), True),
        ("fp8", "cuda", True, (8, 6), False),
        ("fp8", "meta", True, (7, 5), True),
        ("int4", "cuda", False, (9, 0), False),
    ],
)
def test_what_can_be_packed_depends_on_the_device(monkeypatch, kind, device, runs, capability, expected):
    monkeypatch.setattr(packed_products, "runs_on", lambda one: runs)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda one: capability)
    assert can_pack(Packing(kind, 32), torch.device(device)) == expected
    assert not can_pack(Packing(kind, 8), torch.device(device)), "no kernel for such groups"


@pytest.mark.parametrize(
    ("outputs", "inputs", "num_parts"),
    [(28672, 4096, 2), (4096, 4096, 8), (64, 8192, 16), (64, 256, 1), (33792, 4096, 1), (33728, 4096, 2)],
)
def test_inputs_are_split_until_every_processor_has_four_programs(outputs, inputs, num_parts):
    """132 processors: 528 programs, of tiles of 64 outputs; a part has two steps of 256 inputs or more."""
    matrix = PackedMatrix(outputs, inputs, Packing("int4", 128), torch.float32, "meta")
    assert matrix.num_parts == num_parts
    num_steps = -(-inputs // 256)
    assert matrix.num_steps * (num_parts - 1) < num_steps <= matrix.num_steps * num_parts


def test_what_a_product_is_launched_with(monkeypatch):
    calls = []
    monkeypatch.setattr(
        packed_products, "launch", lambda kernel, grid, *_, **options: calls.append((kernel.__name__, grid, options))
    )
    for outputs, num_rows, dtype, bias in (
        (4096, 1, torch.bfloat16, True),
        (28672, 100, torch.float32, True),
        (70, 33, torch.float16, False),
    ):
        matrix = PackedMatrix(outputs, 4096, Packing("int4", 64, has_zeros=True), torch.float32, "meta")
        x = torch.empty(num_rows, 4096, dtype=dtype, device="meta")
        matrix.multiply(x, torch.empty(outputs, dtype=dtype, device="meta") if bias else None)
    first, merge, second, _, third, merged = calls
    shape = dict(PER_WORD=8, SPAN=32, GROUP=64, HAS_ZEROS=True, RUN=2, BLOCK_N=64, HAS_BIAS=False, num_stages=2)
    shape |= dict(num_warps=4)
    assert first[:2] == ("multiply_packed", (1, 64, 8))
    assert first[2].items() >= (shape | dict(BLOCK_M=16, PRECISION="tf32")).items()
    assert merge == ("merge_parts", (4,), dict(PARTS=8, HAS_BIAS=True, BLOCK=1024))
    assert second[:2] == ("multiply_packed", (2, 448, 2))
    assert second[2].items() >= (shape | dict(BLOCK_M=64, PRECISION="ieee")).items()
    assert third[1] == (1, 2, 8) and merged[1] == (3,) and not merged[2]["HAS_BIAS"]
    assert not any(options["WIDEN"] for _, _, options in calls if "WIDEN" in options) or packed_products.INTERPRETS


def test_a_cleared_matrix_is_zero_and_codes_that_are_no_numbers_are_seen():
    packing = Packing("fp8", 128)
    rows = PackedRows(matrix := PackedMatrix(64, 128, packing, torch.float32, "cpu"), slice(None))
    assert rows.dtype == torch.float8_e4m3fn and rows.numel() == 64 * 128
    rows.normal_(std=0.5)
    low, high = rows.aminmax()
    assert low == high == 0.5, "twice the deviation for codes below 2"
    matrix.clear()
    assert not matrix.scales.any()
    for nan in (0x7F, 0xFF):
        rows.normal_(std=0.5)
        matrix.weights.view(torch.uint8)[3, 5] = nan
        assert all(one.isnan() for one in rows.aminmax())
