from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from parallel.kernels import library, products
from parallel.kernels.products import MOST_INPUTS, Panels, has_products, has_tiles, look_up_rows, multiply_rounded

pytestmark = pytest.mark.skipif(not has_products(), reason="needs a C++ compiler; apt-get install g++")
SHAPES = [(64, 32), (97, 33), (5, 7), (2, 300), (640, 192), (608, 40)]


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_weight_and_what_follows_the_product(num_threads, shape):
    torch.manual_seed(0)
    outputs, inputs = shape
    matrix, bias, scales = torch.randn(shape), torch.randn(outputs), torch.rand(outputs)
    codes = torch.randint(-127, 128, shape, dtype=torch.int8)
    for num_rows in (1, 2, 5, 6, 7, 20):
        x = torch.randn(num_rows, inputs)
        expected = F.linear(x, matrix, bias)
        close(Panels(matrix).multiply(x, bias), expected)
        close(Panels(matrix.bfloat16()).multiply(x), F.linear(x, matrix.bfloat16().float()))
        close(Panels(codes, scales).multiply(x), F.linear(x, codes * scales[:, None]))
        assert Panels(matrix).gates == (outputs % 32 == 0)
        if outputs % 32 == 0:
            gate, up = expected.chunk(2, -1)
            close(Panels(matrix).multiply(x, bias, gated=True), F.silu(gate) * up)


def summed_in_pairs(x, matrix):
    """x @ matrix.T as `products.py` defines it for bfloat16 without AMX, addition by addition."""
    x, matrix = (F.pad(one, (0, one.shape[1] % 2)).float() for one in (x, matrix))
    total = torch.zeros(len(x), len(matrix))
    for i in range(0, x.shape[1], 2):
        total = total + x[:, i + 1, None] * matrix[:, i + 1]
        total = total + x[:, i, None] * matrix[:, i]
    return total


def summed_in_tiles(x, matrix):
    """The same with AMX."""
    x, matrix = (F.pad(one, (0, -one.shape[1] % 32)).float() for one in (x, matrix))
    total = torch.zeros(len(x), len(matrix))
    for first in range(0, x.shape[1], 32):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for i in range(first, first + 32, 2):
            even = even + x[:, i, None] * matrix[:, i]
            odd = odd + x[:, i + 1, None] * matrix[:, i + 1]
        total = total + (even + odd)
    return total


def three_of_bfloat16(x):
    """Rows of float32 as the sum of three."""

    def cut(numbers):
        return (numbers.view(torch.int32) & ~0xFFFF).view(torch.float32)

    first = cut(x)
    second = cut(x - first)
    return [part.bfloat16() for part in (first, second, x - first - second)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_bfloat16_are_multiplied_as_defined_to_the_bit(num_threads, shape):
    torch.manual_seed(0)
    matrix, bias, x = (torch.randn(size).bfloat16() for size in (shape, shape[0], (50, shape[1])))
    summed = summed_in_tiles if has_tiles() else summed_in_pairs
    panels, expected = Panels(matrix, rows=torch.bfloat16), summed(x, matrix)
    assert torch.equal(panels.multiply(x, wide=True), expected)
    assert torch.equal(panels.multiply(x, bias), (expected + bias.float()).bfloat16()), "rounded once"
    # every addition rounds by at most 2^-24 of a sum that is not larger than that of all sizes
    wide, sizes = x.double() @ matrix.double().T, x.double().abs() @ matrix.double().abs().T
    assert ((expected - wide).abs() <= 1.01 * shape[1] * 2**-24 * sizes).all()
    if shape[0] % 32 == 0:
        gate, up = expected.chunk(2, -1)
        close(panels.multiply(x, gated=True, wide=True), F.silu(gate) * up)
        assert torch.equal(panels.multiply(x, gated=True), panels.multiply(x, gated=True, wide=True).bfloat16())


HAS = (Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "").split()


@pytest.fixture
def compile_without(monkeypatch, tmp_path):
    """Use kernels that are compiled without AMX and these instructions of x86."""

    def compile_(*instructions):
        flags = [*library._flags(), "-O1", *(f"-mno-{name}" for name in ("amx-tile", *instructions))]
        monkeypatch.setattr(library, "_flags", lambda: flags)
        other = ctypes.CDLL(str(library.build(tmp_path)))
        monkeypatch.setattr(library, "library", lambda: other)
        for name in ("_multiply", "_gather", "_pack"):
            kernel = getattr(products, name)
            monkeypatch.setattr(products, name, getattr(kernel, "__wrapped__", kernel))

    return compile_


@pytest.mark.skipif("avx512_bf16" not in HAS, reason="this processor has no dot products of bfloat16")
def test_without_the_instruction_the_bits_are_the_same(compile_without):
    torch.manual_seed(0)
    matrix, x = torch.randn(80, 301).bfloat16(), torch.randn(9, 301).bfloat16()
    expected = summed_in_pairs(x, matrix)
    for instructions in ([], ["avx512bf16"]):
        compile_without(*instructions)
        assert not has_tiles()
        assert torch.equal(Panels(matrix, rows=torch.bfloat16).multiply(x, wide=True), expected)


@pytest.mark.skipif(not has_tiles(), reason="this processor or system has no AMX")
@pytest.mark.parametrize("shape", [*SHAPES, (48, 1000)])
@pytest.mark.parametrize("num_rows", [1, 5, 6, 11, 33, 100])
def test_rows_of_float32_are_multiplied_in_three_parts(num_threads, shape, num_rows):
    torch.manual_seed(0)
    matrix, bias, x = torch.randn(shape).bfloat16(), torch.randn(shape[0]), torch.randn(num_rows, shape[1])
    x *= torch.logspace(-4, 4, shape[1])[torch.randperm(shape[1])]
    first, second, third = (summed_in_tiles(part, matrix) for part in three_of_bfloat16(x))
    assert torch.equal(Panels(matrix).multiply(x, bias), first + (second + third) + bias)


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e30])
@pytest.mark.parametrize("is_even", [True, False])
def test_rows_of_float32_are_as_exact_as_float32_by_matrices_of_bfloat16(scale, is_even):
    """Against float64, beside sums of float32 in the order of the inputs; where inputs are not even, large ones lie
    among small ones."""
    torch.manual_seed(0)
    matrix, x = torch.randn(96, 2048).bfloat16(), scale * torch.randn(20, 2048)
    if not is_even:
        x *= torch.logspace(-6, 6, 2048)[torch.randperm(2048)]
    exact, sizes = x.double() @ matrix.double().T, x.double().abs() @ matrix.double().abs().T
    plain = torch.zeros(20, 96)
    for i in range(2048):
        plain = plain + x[:, i, None] * matrix[:, i].float()
    off, allowed = (((found - exact) / sizes).abs() for found in (Panels(matrix).multiply(x), plain))
    assert off.mean() <= 1.1 * allowed.mean() and off.max() <= 1.5 * allowed.max()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_shows_and_changes_no_other(bad):
    torch.manual_seed(0)
    for rows in (torch.float32, torch.bfloat16):
        matrix, x = torch.randn(20, 37).bfloat16(), torch.randn(3, 37).to(rows)
        panels = Panels(matrix, rows=rows)
        before = panels.multiply(x)
        x[1, 36] = bad
        after = panels.multiply(x)
        assert torch.equal(after[::2], before[::2])
        torch.testing.assert_close(after[1], F.linear(x[1], matrix.to(rows)), rtol=0, atol=0, equal_nan=True)


def test_nan_of_any_bits_and_the_largest_number_keep_their_kind():
    """The first half of such a NaN is infinity's; the largest float32 rounds to infinity in bfloat16."""
    bits = torch.tensor([[0x7F800001, 0], [0x7F7FFFFF, 0]], dtype=torch.int32)
    found = Panels(torch.eye(2).bfloat16()).multiply(bits.view(torch.float32))
    assert found[0, 0].isnan() and found[1, 0] == torch.finfo(torch.float32).max


VECTORS = {
    "vectors as wide": (),
    "pairs of 16 bits": ("avx512vnni", "avxvnni"),
    "half as wide": ("avx512f", "avxvnni"),
    "byte after byte": ("avx512bw", "avx512vnni"),
}


@pytest.mark.extended
@pytest.mark.skipif("avx2" not in HAS, reason="of x86")
@pytest.mark.parametrize("vectors", VECTORS)
def test_rounded_rows_have_the_same_bits_by_all_instructions(compile_without, vectors):
    torch.manual_seed(0)
    codes, scales, x = torch.randint(-127, 128, (80, 301), dtype=torch.int8), torch.rand(80), torch.randn(61, 301)
    x[:9], codes[:9] = x[:9].sign(), codes[:9].sign() * 127  # the largest products
    rows, ids = [x, x.bfloat16()], torch.tensor([79, 3])
    before = [Panels(codes, scales, one.dtype, rounds=True).multiply(one, wide=True) for one in rows]
    compile_without(*VECTORS[vectors])
    for one, expected in zip(rows, before, strict=True):
        panels = Panels(codes, scales, one.dtype, rounds=True)
        assert torch.equal(panels.multiply(one, wide=True), expected)
        assert torch.equal(expected.to(one.dtype), multiply_rounded(one, codes, scales))
        assert torch.equal(panels.rows(ids), (codes[ids] * scales[ids, None]).to(one.dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_rows_are_multiplied_as_defined_to_the_bit(num_threads, shape, dtype):
    torch.manual_seed(0)
    codes, scales = torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0])
    x, bias = torch.randn(100, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    x[:7] *= torch.logspace(-33, 33, 7)[:, None].to(dtype)
    x[7] = 0
    panels, expected = Panels(codes, scales, dtype, rounds=True), multiply_rounded(x, codes, scales, bias)
    assert torch.equal(panels.multiply(x, bias), expected)
    whole = torch.cat((x, x.flip(0) * 3), 1).float().abs().amax(1, keepdim=True)
    assert torch.equal(panels.multiply(x, largest=whole), multiply_rounded(x, codes, scales, largest=whole))
    # each number is off by half a step of its row at most
    numbers, steps = codes.double() * scales[:, None].double(), x.double().abs().amax(1) / 127
    off = (panels.multiply(x, wide=True).double() - x.double() @ numbers.T).abs()
    allowed = 0.5 * steps[:, None].clamp(min=1e-32) * numbers.abs().sum(1)
    assert (off <= 1.01 * allowed + 1e-6 * shape[1] * steps[:, None] * numbers.abs().amax(1) * 127).all()
    if shape[0] % 32 == 0:
        gate, up = panels.multiply(x, wide=True).chunk(2, -1)
        torch.testing.assert_close(panels.multiply(x, gated=True, wide=True), F.silu(gate) * up, atol=1e-3, rtol=1e-4)


def test_the_longest_row_adds_up_to_what_an_int32_holds():
    codes, x = torch.full((2, MOST_INPUTS), 127, dtype=torch.int8), torch.full((2, MOST_INPUTS), 0.5)
    x[1], sign = -0.5, torch.tensor([[1.0], [-1.0]])
    panels = Panels(codes, torch.ones(2), rounds=True)
    assert torch.equal(panels.multiply(x), sign * (torch.tensor(127.0**2 * MOST_INPUTS) * (0.5 / 127)).expand(2, 2))
    with pytest.raises(AssertionError, match="more than an int32 holds"):
        Panels(torch.zeros(1, MOST_INPUTS + 1, dtype=torch.int8), torch.ones(1), rounds=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_rounded_row_that_is_not_finite_shows_and_changes_no_other(bad):
    torch.manual_seed(0)
    codes, x = torch.randint(1, 128, (20, 37), dtype=torch.int8), torch.rand(3, 37)
    panels = Panels(codes, torch.rand(20), rounds=True)
    before = panels.multiply(x)
    x[1, 36] = bad
    after = panels.multiply(x)
    assert not after[1].isfinite().any() and torch.equal(after[::2], before[::2])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8, "pairs", "w8a8"])
@pytest.mark.parametrize("num_rows", [6, 50])
def test_a_broken_row_changes_no_other_of_its_tile_or_chunk(num_threads, stored, num_rows):
    """More inputs than a block, an odd last one among them where they may be; also with gates."""
    torch.manual_seed(0)
    rounds, rows = stored == "w8a8", torch.bfloat16 if stored == "pairs" else torch.float32
    stored = {"pairs": torch.bfloat16, "w8a8": torch.int8}.get(stored, stored)
    matrix, x = torch.randn(96, 777).mul(30).clamp(-127, 127).to(stored), torch.randn(num_rows, 777).to(rows)
    panels = Panels(matrix, torch.rand(96) if stored == torch.int8 else None, rows, rounds=rounds)
    before = [panels.multiply(x, gated=gated) for gated in (False, True)]
    for broken in (0, 5, num_rows - 1):
        others = torch.arange(num_rows) != broken
        for bad in (torch.nan, torch.inf, 3e38, 1e-42):
            worse = x.clone()
            worse[broken] = bad
            for gated in (False, True):
                found = panels.multiply(worse, gated=gated)
                assert torch.equal(found[others], before[gated][others]), f"beside {bad} in row {broken}"


@pytest.mark.parametrize("values", [torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38])])
def test_what_no_number_holds_is_rounded_as_torch_rounds_it(values):
    """Sums are stored as bfloat16 with infinities, NaN and overflow."""
    matrix, x = torch.ones(1, 2).bfloat16(), torch.stack((values, values), 1).bfloat16()
    panels = Panels(matrix, rows=torch.bfloat16)
    torch.testing.assert_close(panels.multiply(x), panels.multiply(x, wide=True).bfloat16(), equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8, "pairs", "w8a8"])
def test_a_row_does_not_depend_on_the_rows_beside_it(num_threads, shape, stored):
    torch.manual_seed(0)
    rounds, rows = stored == "w8a8", torch.bfloat16 if stored == "pairs" else torch.float32
    stored = {"pairs": torch.bfloat16, "w8a8": torch.int8}.get(stored, stored)
    matrix, x = torch.randn(shape).mul(30).clamp(-127, 127).to(stored), torch.randn(64, shape[1]).to(rows)
    scales = torch.rand(shape[0]) if stored == torch.int8 else None
    panels = Panels(matrix, scales, rows, rounds=rounds)
    alone = torch.cat([panels.multiply(row) for row in x.split(1)])
    for num_rows in range(1, 65):
        assert torch.equal(panels.multiply(x[-num_rows:]), alone[-num_rows:])
    if shape[0] % 32 == 0:
        alone = torch.cat([panels.multiply(row, gated=True) for row in x.split(1)])
        assert torch.equal(panels.multiply(x, gated=True), alone)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_read_back(shape):
    matrix, scales = torch.randn(shape).mul(50), torch.rand(shape[0])
    codes, ids = matrix.to(torch.int8), torch.randint(0, shape[0], (9,))
    assert torch.equal(Panels(matrix).rows(ids), matrix[ids])
    assert torch.equal(Panels(matrix.bfloat16()).rows(ids), matrix.bfloat16()[ids].float())
    assert torch.equal(Panels(codes, scales).rows(ids), codes[ids] * scales[ids, None])
    pairs = Panels(matrix.bfloat16(), rows=torch.bfloat16)
    assert torch.equal(pairs.rows(ids), matrix.bfloat16()[ids])
    assert pairs.rows(torch.tensor([-1, shape[0]])).isnan().all()
    unknown = Panels(matrix).rows(torch.tensor([-1, shape[0]]))
    assert unknown.isnan().all(), "nothing outside of the matrix is read"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("inputs", [5, 16, 200])
def test_rows_of_a_matrix_that_is_not_packed(inputs, stored, dtype):
    draw = torch.Generator().manual_seed(inputs)
    matrix, scales = (20 * torch.randn(30, inputs, generator=draw)).to(stored), None
    if stored == torch.int8:
        scales = torch.rand(30, generator=draw)
    ids = torch.tensor([29, 0, 7, 7, 30, -1])
    found = look_up_rows(matrix, scales, ids, dtype)
    rows = matrix[ids[:4]] if scales is None else matrix[ids[:4]] * scales[ids[:4], None]
    assert torch.equal(found[:4], rows.to(dtype))
    assert found[4:].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_that_fill_up_a_matrix_are_not_counted(shape):
    """Bytes of models are computed from shapes, on machines without these kernels too."""
    codes, scales = torch.zeros(shape, dtype=torch.int8), torch.ones(shape[0])
    for panels in (Panels(codes, scales), Panels(codes, scales, rounds=True)):
        assert panels.weights.nbytes == codes.nbytes
    for rows in (torch.float32, torch.bfloat16):
        assert Panels(codes.bfloat16(), rows=rows).weights.nbytes == 2 * codes.nbytes
