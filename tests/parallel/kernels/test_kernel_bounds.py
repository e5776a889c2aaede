"""The kernels of a CPU read and write nothing outside of their tensors, and take blocks, chunks and threads together.

Inputs lie between numbers that are none, outputs between marks: what is read outside shows in a result, what is written
outside in a mark.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import pytest
import torch
import torch.nn.functional as F

from parallel.kernels.library import function
from parallel.kernels.norms import has_norms
from parallel.kernels.products import PANEL, Panels, has_products, multiply_rounded

pytestmark = pytest.mark.skipif(not has_norms(), reason="no C++ compiler")
GUARD, MARK = 128, 12345.0


def between_nans(tensor):
    """The same numbers, contiguous, with NaN before and behind them (of integers, 99)."""
    nothing = torch.nan if tensor.is_floating_point() else 99
    whole = torch.full((tensor.numel() + 2 * GUARD,), nothing, dtype=tensor.dtype)
    inside = whole[GUARD:-GUARD].view(tensor.shape)
    inside.copy_(tensor)
    return inside


class Guarded:
    """Room for a result between marks."""

    def __init__(self, *shape, dtype=torch.float32):
        mark = MARK if dtype.is_floating_point else 77
        self._whole = torch.full((int(torch.Size(shape).numel()) + 2 * GUARD,), mark, dtype=dtype)
        self._mark = self._whole[0].clone()
        self.inside = self._whole[GUARD:-GUARD].view(shape)

    def result(self):
        edges = torch.cat((self._whole[:GUARD], self._whole[-GUARD:]))
        assert (edges == self._mark).all(), "written outside"
        return self.inside


@pytest.mark.parametrize("size", [1, 3, 15, 16, 17, 31, 33, 100])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_stay_within_their_rows(size, num_rows, dtype):
    shapes, is_bfloat = ((num_rows, size), (size,), (size,)), dtype == torch.bfloat16
    x, weight, bias = (between_nans(torch.randn(*shape).to(dtype)) for shape in shapes)
    rounding = dict(atol=1e-5, rtol=2**-8 if is_bfloat else 1e-5)
    out = Guarded(num_rows, size, dtype=dtype)
    rms = function("normalize_rms", *[c_void_p] * 3, *[c_int64] * 2, *[c_float] * 2, c_int)
    rms(x.data_ptr(), weight.data_ptr(), out.inside.data_ptr(), num_rows, size, 0.1, 1.0, is_bfloat)
    wide = x.float()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * (weight.float() + 1)
    torch.testing.assert_close(out.result().float(), expected, **rounding)
    out = Guarded(num_rows, size, dtype=dtype)
    layer = function("normalize_layer", *[c_void_p] * 4, *[c_int64] * 2, c_float, c_int)
    layer(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.inside.data_ptr(), num_rows, size, 0.1, is_bfloat)
    expected = F.layer_norm(wide, (size,), weight.float(), bias.float(), 0.1)
    torch.testing.assert_close(out.result().float(), expected, **rounding)
    out, added = Guarded(num_rows, size, dtype=dtype), between_nans(torch.randn(num_rows, size).to(dtype))
    add = function("add_rows", *[c_void_p] * 3, *[c_int64] * 2, c_int)
    add(x.data_ptr(), added.data_ptr(), out.inside.data_ptr(), num_rows, size, is_bfloat)
    assert torch.equal(out.result(), x + added)


SHAPES = [(1, 1), (15, 3), (16, 5), (17, 4), (33, 7), (64, 385), (65, 33), (96, 800)]


STORED = [torch.float32, torch.bfloat16, torch.int8, "pairs", "w8a8", "w8a8 of bfloat16"]
TYPES = {
    "pairs": (torch.bfloat16, torch.bfloat16),
    "w8a8": (torch.int8, torch.float32),
    "w8a8 of bfloat16": (torch.int8, torch.bfloat16),
}
"""Of the matrix and of the rows, where these are not float32 for the type itself."""
PER_STEP = {torch.bfloat16: 2, "pairs": 2, "w8a8": 4, "w8a8 of bfloat16": 4}


def packed(matrix, stored):
    """As `pack_panels` lays it out, between numbers that are none."""
    outputs, inputs = matrix.shape
    size, step = -(-outputs // PANEL) * PANEL, PER_STEP.get(STORED[stored], 1)
    room = Guarded(size * inputs, dtype=matrix.dtype)
    pack = function("pack_panels", *[c_void_p] * 2, *[c_int64] * 2, c_int)
    given = between_nans(matrix)
    pack(given.data_ptr(), room.inside.data_ptr(), inputs, outputs, stored)
    panels = room.result().view(-1, inputs // step, PANEL, step).transpose(1, 2).reshape(size, inputs)
    if step == 4:
        panels = torch.cat((panels[:outputs] + -128, panels[outputs:]))  # modulo 256
    assert torch.equal(panels[:outputs], matrix) and not panels[outputs:].any(), "the last panel is filled with zeros"
    return between_nans(room.inside)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", range(len(STORED)))
def test_products_stay_within_their_matrix(shape, stored):
    torch.manual_seed(0)
    outputs, inputs = shape
    step = PER_STEP.get(STORED[stored], 1)
    dtype, rows = TYPES.get(STORED[stored], (STORED[stored], torch.float32))
    inputs += inputs % 2 if step == 2 else 0
    matrix = torch.randn(outputs, inputs).mul(9).to(dtype)
    matrix, width = F.pad(matrix, (0, -inputs % step)), inputs + -inputs % step
    panels, matrix = packed(matrix, stored), matrix[:, :inputs]
    scales, bias = between_nans(torch.rand(outputs) + 0.5), between_nans((torch.rand(outputs) + 0.5).to(rows))
    numbers = (matrix.float() * scales[:, None]).double()
    multiply = function("multiply_rows", *[c_void_p] * 6, *[c_int64] * 3, *[c_int] * 3)
    for num_rows in (1, 7, 25, 49):
        x, out = between_nans(torch.randn(num_rows, inputs).to(rows)), Guarded(num_rows, outputs)
        pointers = [one.data_ptr() for one in (x, panels, scales, bias)]
        multiply(*pointers, None, out.inside.data_ptr(), num_rows, inputs, outputs, stored, 0, 1)
        if step == 4:
            assert torch.equal(out.result(), multiply_rounded(x.float(), matrix, scales, bias))
        else:
            expected = x.double() @ numbers.T + bias.double()
            torch.testing.assert_close(out.result().double(), expected, atol=2e-3, rtol=1e-4)
    gather = function("gather_rows", *[c_void_p] * 4, *[c_int64] * 3, c_int)
    ids, out = torch.tensor([outputs - 1, 0, outputs // 2]), Guarded(3, width, dtype=rows)
    scales = torch.ones(outputs) if STORED[stored] == "pairs" else scales
    pointers = (one.data_ptr() for one in (panels, scales, ids, out.inside))
    gather(*pointers, 3, width, outputs, stored)
    assert torch.equal(out.result()[:, :inputs], (matrix[ids].float() * scales[ids, None]).to(rows))


@pytest.mark.skipif(not has_products(), reason="no C++ compiler")
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_rows_and_inputs_are_those_of_each_row_alone(stored, num_threads):
    """More inputs than a block, more rows than a chunk, and gates."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        dtype, rows = TYPES.get(stored, (stored, torch.float32))
        rounds = PER_STEP.get(stored) == 4
        inputs = 5000 if rounds else 1000
        matrix, x = torch.randn(96, inputs).mul(9).to(dtype), torch.randn(101, inputs).to(rows)
        scales = torch.rand(96) if dtype == torch.int8 else None
        panels = Panels(matrix, scales, rows, rounds=rounds)
        for gated in (False, True):
            together = panels.multiply(x, gated=gated, wide=True)
            assert torch.equal(
                together, torch.cat([panels.multiply(row, gated=gated, wide=True) for row in x.split(1)])
            )
            numbers = matrix.double() if scales is None else matrix.double() * scales[:, None]
            plain = multiply_rounded(x.float(), matrix, scales).double() if rounds else x.double() @ numbers.T
            expected = F.silu(plain[:, :48]) * plain[:, 48:] if gated else plain
            torch.testing.assert_close(together.double(), expected, atol=0.05, rtol=1e-4)
    finally:
        torch.set_num_threads(before)
