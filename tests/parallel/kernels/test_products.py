from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallel.kernels.products import Panels, has_products

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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8])
def test_a_row_does_not_depend_on_the_rows_beside_it(num_threads, shape, stored):
    torch.manual_seed(0)
    matrix, x = torch.randn(shape).mul(50).to(stored), torch.randn(64, shape[1])
    scales = torch.rand(shape[0]) if stored == torch.int8 else None
    panels = Panels(matrix, scales)
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
    unknown = Panels(matrix).rows(torch.tensor([-1, shape[0]]))
    assert unknown.isnan().all(), "nothing outside of the matrix is read"
