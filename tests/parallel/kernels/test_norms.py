"""The kernels of norms against their formulas in float64, for sizes around the width of a vector."""

from __future__ import annotations

import pytest
import torch

from parallel.kernels.norms import has_norms, layer_norm, rms_norm

pytestmark = pytest.mark.skipif(not has_norms(), reason="no C++ compiler")


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [3, 16, 40, 192, 1000])
def test_rms_norm(size, offset):
    x, weight = torch.randn(5, size) * 3, torch.randn(size)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 0.01).sqrt() * (weight + offset)
    torch.testing.assert_close(rms_norm(x, weight, 0.01, offset), expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [3, 16, 40, 192, 1000])
def test_layer_norm(size):
    x, weight, bias = torch.randn(5, size) * 3 + 2, torch.randn(size), torch.randn(size)
    expected = torch.nn.functional.layer_norm(x.double(), (size,), weight.double(), bias.double(), 0.01)
    torch.testing.assert_close(layer_norm(x, weight, bias, 0.01), expected.float(), atol=1e-5, rtol=1e-5)


def test_a_row_is_the_same_to_the_bit_alone_and_in_company():
    x, weight, bias = torch.randn(700, 200), torch.randn(200), torch.randn(200)
    assert torch.equal(rms_norm(x, weight, 1e-5, 0.0)[650:651], rms_norm(x[650:651], weight, 1e-5, 0.0))
    assert torch.equal(layer_norm(x, weight, bias, 1e-5)[650:651], layer_norm(x[650:651], weight, bias, 1e-5))
