"""Products with codes against float64, on the GPU or in Triton's interpreter; `compile_triton.py` compiles them for a
GPU."""

from __future__ import annotations

import random

import pytest
import torch

from parallel.kernels import packed_products
from parallel.kernels.packed_products import MOST_ROWS, Codes, PackedMatrix, PackedRows
from parallel.kernels.packing import Packing
from parallel.kernels.triton_launch import has_triton
from tests.matrices import in_turn

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton (pip install triton)")
EPSILON = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Rounding of the results, relative to the largest; in the interpreter it is towards zero."""
KINDS = [
    Packing("int4", 32, has_zeros=True, scale_bytes=2),
    Packing("int4", 128, scale_bytes=2),
    Packing("int4", 48),
    Packing("int4"),
    Packing("int8"),
    Packing("fp8", 128),
    Packing("fp8", 64),
    Packing("fp8"),
]


def random_codes(packing: Packing, outputs: int, inputs: int) -> Codes:
    groups = torch.arange(inputs) // (packing.group or inputs)
    shape = outputs, packing.num_groups(inputs)
    if packing.kind == "int4":
        values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    else:
        values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        values = values if packing.kind == "int8" else (values / 60).to(torch.float8_e4m3fn)
    scales = (torch.rand(shape) + 0.5).to(torch.bfloat16 if packing.scale_bytes == 2 else torch.float32)
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8) if packing.has_zeros else None
    return Codes(values, scales, zeros, groups)


def packed(codes: Codes, packing: Packing, cut: int, device: torch.device) -> PackedMatrix:
    """Filled in two parts, as fused layers are."""
    outputs, inputs = codes.values.shape
    matrix = PackedMatrix(outputs, inputs, packing, codes.scales.dtype, device)
    for own in (slice(cut), slice(cut, None)):
        zeros = None if codes.zeros is None else codes.zeros[own]
        PackedRows(matrix, own).copy_(Codes(codes.values[own], codes.scales[own], zeros, codes.groups))
    return matrix


@pytest.mark.parametrize(("packing", "dtype"), list(in_turn(KINDS, EPSILON)), ids=str)
def test_products_are_those_of_the_numbers(packing, dtype, device):
    """Products have any shape, type and number of rows, and their inputs are split over programs or not."""
    draw = random.Random(f"{packing} {dtype}")
    torch.manual_seed(draw.randrange(1000))
    outputs, inputs = draw.randrange(20, 90), draw.choice([96, 7 * 48 + 5, 1100])
    codes = random_codes(packing, outputs, inputs)
    matrix = packed(codes, packing, draw.randrange(outputs), device)
    x, bias = torch.randn(draw.choice([1, 3, 20]), inputs).to(dtype), torch.randn(outputs).to(dtype)
    expected = x.double() @ codes.numbers().double().T + bias.double()
    found = matrix.multiply(x.to(device), bias.to(device)).cpu().double()
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < EPSILON[dtype], (outputs, inputs, len(x))
    assert torch.equal(matrix.unpacked(torch.float32).cpu(), codes.numbers())
    assert matrix.num_parts > 1 or inputs < 1100


def test_many_rows_are_multiplied_by_the_numbers_and_few_by_the_codes(monkeypatch):
    """One launch a product, and one to merge where the inputs are split."""
    seen = []
    monkeypatch.setattr(packed_products, "launch", lambda kernel, *_, **__: seen.append(kernel.__name__))

    def launches(outputs: int, num_rows: int) -> list[str]:
        matrix = PackedMatrix(outputs, 4096, Packing("int4", 128), torch.float32, "meta")
        x = torch.empty(num_rows, 4096, dtype=torch.bfloat16, device="meta")
        assert matrix.multiply(x).shape == (num_rows, outputs)
        found = [*seen]
        seen.clear()
        return found

    assert launches(40960, 1) == launches(40960, MOST_ROWS) == ["multiply_packed"]
    assert launches(4096, 1) == launches(4096, 64) == ["multiply_packed", "merge_parts"]
    assert launches(4096, MOST_ROWS + 1) == ["unpack_matrix"]


def test_random_codes_are_finite(device):
    for packing in (Packing("int4", 32, has_zeros=True), Packing("int8"), Packing("fp8", 128)):
        rows = PackedRows(matrix := PackedMatrix(64, 128, packing, torch.float32, device), slice(None))
        rows.normal_(std=0.02)
        numbers = matrix.unpacked(torch.float32).cpu()
        assert 0.005 < numbers.std() < 0.04 and torch.isfinite(torch.stack(rows.aminmax())).all()
