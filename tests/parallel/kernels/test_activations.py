"""The kernel of activations, soft caps and factors against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallel.kernels.activations import Function, map_rows, maps_rows
from parallel.kernels.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

FORMULAS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": lambda x: x * torch.special.ndtr(x),  # not F.gelu: 1 + erf(x) has few digits far below 0
    "gelu_pytorch_tanh": lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
    "sigmoid": torch.sigmoid,
    "soft_cap": lambda x: 3.5 * torch.tanh(x / 3.5),
    "scale": lambda x: x * 3.5,
}
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Rounding of a result, relative to it: of a power of e, whose exponent may be 15, and to the nearest number."""


def mapped(function: Function, x: torch.Tensor, **options) -> torch.Tensor:
    return map_rows(function, x, 3.5 if function in ("soft_cap", "scale") else 0.0, **options)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("function", FORMULAS)
def test_each_function_in_float64(function, dtype):
    size = torch.logspace(-6, 1.6, 4001)
    x = torch.cat((-size, torch.zeros(1), size))[None].to(dtype)
    expected = FORMULAS[function](x.double())
    torch.testing.assert_close(mapped(function, x).double(), expected, atol=1e-9, rtol=ROUNDING[dtype])


@pytest.mark.parametrize("function", FORMULAS)
def test_numbers_without_an_end_and_none(function):
    x = torch.tensor([[float("inf"), float("nan"), 1e30, -1e30]])
    expected = FORMULAS[function](x.double()).float()
    torch.testing.assert_close(mapped(function, x), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [1, 16, 17, 40, 192])
def test_gates_are_the_first_half_of_a_row(size, dtype):
    x = (3 * torch.randn(5, 2 * size)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    found = map_rows("gelu", x, gated=True)
    torch.testing.assert_close(found.double(), FORMULAS["gelu"](gate) * up, atol=1e-7, rtol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("function", FORMULAS)
def test_a_row_is_the_same_to_the_bit_alone_and_in_company(function, gated, dtype):
    x = (3 * torch.randn(300, 2 * 77)).to(dtype)
    together = mapped(function, x, gated=gated)
    alone = [mapped(function, x[row : row + 1], gated=gated) for row in (0, 1, 150, 299)]
    assert torch.equal(torch.cat(alone), together[[0, 1, 150, 299]])


@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_pytorch_tanh", "soft_cap"])
def test_a_number_has_the_same_bits_wherever_it_stands(function):
    x = torch.randn(1, 61)
    moved = torch.stack([mapped(function, x.roll(shift, 1)).roll(-shift, 1)[0] for shift in range(61)])
    assert torch.equal(moved, moved[:1].expand_as(moved))


@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_on_several_threads(threads):
    before, x = torch.get_num_threads(), torch.randn(200, 333)
    torch.set_num_threads(threads)
    found = map_rows("gelu", x)
    torch.set_num_threads(before)
    torch.testing.assert_close(found.double(), F.gelu(x.double()), atol=1e-6, rtol=1e-5)


def test_a_transposed_tensor_is_read_as_it_is_meant():
    x = torch.randn(7, 5)
    assert torch.equal(map_rows("silu", x.T), map_rows("silu", x.T.contiguous()))


def test_what_the_kernel_does_not_know_is_pytorchs():
    x = torch.zeros(2, 2)
    assert maps_rows(x) and maps_rows(x.bfloat16())
    assert not any(map(maps_rows, (x.double(), x.half(), x.to("meta"), x.clone().requires_grad_())))
