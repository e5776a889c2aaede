"""The kernels of norms against their formulas in float64, for sizes around the width of a vector."""

from __future__ import annotations

import pytest
import torch

from parallel.kernels import norms
from parallel.kernels.norms import add_rows, has_norms, layer_norm, rms_norm

pytestmark = pytest.mark.skipif(not has_norms(), reason="no C++ compiler")


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
"""Rounding of a result, relative to it: of sums in float32, and then to the nearest number of that type."""


def close(found, expected):
    tolerance = ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=tolerance)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [3, 16, 40, 192, 1000])
def test_rms_norm(size, offset, dtype):
    x, weight = (torch.randn(5, size) * 3).to(dtype), torch.randn(size).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 0.01).sqrt() * (weight.double() + offset)
    close(rms_norm(x, weight, 0.01, offset), expected)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [3, 16, 40, 192, 1000])
def test_layer_norm(size, dtype):
    x, weight, bias = ((one + 2).to(dtype) for one in (torch.randn(5, size) * 3, torch.randn(size), torch.randn(size)))
    expected = torch.nn.functional.layer_norm(x.double(), (size,), weight.double(), bias.double(), 0.01)
    close(layer_norm(x, weight, bias, 0.01), expected)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_row_is_the_same_to_the_bit_alone_and_in_company(dtype):
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((700, 200), 200, 200))
    assert torch.equal(rms_norm(x, weight, 1e-5, 0.0)[650:651], rms_norm(x[650:651], weight, 1e-5, 0.0))
    assert torch.equal(layer_norm(x, weight, bias, 1e-5)[650:651], layer_norm(x[650:651], weight, bias, 1e-5))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(43, 768), (2000, 17), (1, 40000), (2, 3)])
def test_sums_are_those_of_pytorch_to_the_bit(shape, dtype):
    x, added = (torch.randn(shape).to(dtype) * 1000 for _ in range(2))
    x[0, 0], x[0, 1], added[0, 1] = float("nan"), float("inf"), float("-inf")
    torch.testing.assert_close(add_rows(x, added), x + added, rtol=0, atol=0, equal_nan=True)


def test_large_sums_are_the_kernels(monkeypatch):
    calls = []
    monkeypatch.setattr(norms, "_add", lambda: lambda *arguments: calls.append(arguments))
    large, small = torch.ones(64, 768), torch.ones(4, 768)
    add_rows(small, small)
    add_rows(large.double(), large.double())
    assert add_rows(large.requires_grad_(), large).requires_grad
    assert not calls
    add_rows(large.detach(), large.detach())
    assert calls
