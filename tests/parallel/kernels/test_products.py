from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallel.kernels.products import has_products, product

pytestmark = pytest.mark.skipif(not has_products(), reason="needs a C++ compiler; apt-get install g++")
SHAPES = [(64, 32), (97, 33), (5, 7), (2, 300), (640, 192)]


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
        x, addend = torch.randn(num_rows, inputs), torch.randn(num_rows, outputs)
        expected = F.linear(x, matrix, bias)
        close(product(x, matrix, bias), expected)
        close(product(x, matrix, bias, addend=addend), expected + addend)
        close(product(x, matrix.bfloat16()), F.linear(x, matrix.bfloat16().float()))
        close(product(x, codes, scales=scales), F.linear(x, codes * scales[:, None]))
        if outputs % 2 == 0:
            gate, up = expected.chunk(2, -1)
            close(product(x, matrix, bias, gated=True), F.silu(gate) * up)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8])
def test_a_row_does_not_depend_on_the_rows_beside_it(num_threads, shape, stored):
    torch.manual_seed(0)
    matrix, x = torch.randn(shape).mul(50).to(stored), torch.randn(64, shape[1])
    scales = torch.rand(shape[0]) if stored == torch.int8 else None
    alone = torch.cat([product(row, matrix, scales=scales) for row in x.split(1)])
    for num_rows in range(1, 65):
        assert torch.equal(product(x[-num_rows:], matrix, scales=scales), alone[-num_rows:])
