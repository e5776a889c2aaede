"""The likeliest columns of rows by the kernel, beside PyTorch's top-k and logarithms of softmax."""

from __future__ import annotations

import pytest
import torch

from parallel.kernels.library import library
from parallel.kernels.likeliest import likeliest

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed + shape[-1]))


@pytest.mark.parametrize("size", [1, 7, 8, 15, 16, 17, 33, 97, 1024, 1025, 4099])
@pytest.mark.parametrize("width", [1, 2, 6, 40])
def test_columns_and_log_probabilities_are_those_of_pytorch(size, width):
    width = min(width, size)
    raced, scores = drawn(9, size), drawn(9, size, seed=1)
    for distribution in (raced, scores):
        columns, log_probs = likeliest(raced, distribution, width)
        assert torch.equal(columns, raced.topk(width).indices)
        expected = distribution.double().log_softmax(-1).gather(1, columns)
        assert torch.allclose(log_probs.double(), expected, atol=2e-6, rtol=1e-6)


def test_of_equal_numbers_the_first():
    raced = torch.zeros(1, 70)
    raced[0, [50, 20, 69]] = 1.0
    assert likeliest(raced, raced, 5)[0].tolist() == [[20, 50, 69, 0, 1]]


def test_a_row_with_fewer_finite_numbers_has_them_first():
    raced = torch.full((1, 40), -torch.inf)
    raced[0, [33, 7]] = torch.tensor([0.0, 1.0])
    columns, log_probs = likeliest(raced, raced, 4)
    assert columns[0, :2].tolist() == [7, 33] and len(set(columns[0].tolist())) == 4
    assert torch.allclose(log_probs[0, :2], torch.tensor([0.0, -1.0]) - torch.tensor([1.0, 0.0]).logsumexp(0) + 1)
    assert log_probs[0, 2:].tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("at", [0, 9, 40, 511])
def test_a_number_that_is_none_hides_no_other(at):
    raced = drawn(1, 512)
    raced[0, at] = torch.nan
    others = raced.nan_to_num(-torch.inf)
    assert torch.equal(likeliest(raced, others, 6)[0], others.topk(6).indices)


@pytest.mark.parametrize("at", [0, 21, 39])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_has_none_and_the_others_have_theirs(at, value):
    raced = drawn(3, 40)
    raced[1, at] = value
    columns, log_probs = likeliest(raced, raced, 3)
    assert log_probs[1].isnan().all() and columns.min() >= 0 and columns.max() < 40
    assert torch.equal(log_probs[[0, 2]], likeliest(raced[[0, 2]], raced[[0, 2]], 3)[1])
    silent = likeliest(torch.full((1, 9), -torch.inf), torch.full((1, 9), -torch.inf), 9)
    assert sorted(silent[0][0].tolist()) == [*range(9)] and silent[1].isnan().all()


def test_rows_are_those_of_one_thread():
    raced, before = drawn(23, 4096), torch.get_num_threads()
    alone = likeliest(raced, raced, 6)
    torch.set_num_threads(2)
    try:
        shared = likeliest(raced, raced, 6)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, alone, shared))
