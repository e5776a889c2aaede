"""What rows keep under top-k, top-p and min-p: the set that sorting them in float64 gives."""

from __future__ import annotations

import math

import pytest
import torch

from parallel.kernels.library import library
from parallel.kernels.truncation import truncate

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")


def kept(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which numbers are kept, bool [V], by their ranks."""
    ranked = row.double().sort(descending=True).values
    weights = (ranked - ranked[0]).exp()
    weights[top_k:] = 0.0
    least = ranked[0] + math.log(min_p) if min_p else -math.inf
    weights[ranked < least] = 0.0
    before = weights.cumsum(0) - weights
    last = max(1, min(top_k, int((before < top_p * weights.sum()).sum())))
    return row.double() >= max(float(ranked[last - 1]), least)


def truncated(rows: torch.Tensor, *of_rows: tuple[int, float, float]) -> torch.Tensor:
    top_ks, top_ps, min_ps = zip(*of_rows, strict=True)
    shares = [math.log(min_p) if min_p else -math.inf for min_p in min_ps]
    return truncate(rows, torch.tensor(top_ks, dtype=torch.int32), torch.tensor(top_ps).double(), torch.tensor(shares))


LIMITS = [
    (5, math.inf, 0.0),
    (1 << 30, 0.9, 0.0),
    (1 << 30, 0.0001, 0.0),
    (1 << 30, math.inf, 0.05),
    (1 << 30, 0.999, 0.0),
    (1, 0.5, 0.0),
    (40, 0.8, 0.001),
    (7, 0.95, 0.3),
    (1 << 30, math.inf, 0.0),
]


@pytest.mark.parametrize("size", [1, 5, 16, 97, 1024, 1040, 4099, 50_000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_rows_keep_what_sorting_keeps(size, spread):
    rows = spread * torch.randn(len(LIMITS), size, generator=torch.Generator().manual_seed(size))
    result = truncated(rows, *LIMITS)
    for row, out, limits in zip(rows, result, LIMITS, strict=True):
        expected = kept(row, *limits)
        assert torch.equal(out, torch.where(expected, row, -torch.inf)), limits
        assert expected.any()
        assert torch.equal(truncated(row[None], limits)[0], out), "a row depends on the others"


@pytest.mark.parametrize("limits", [(3, math.inf, 0.0), (3, 0.7, 0.0), (1 << 30, 0.7, 0.0), (2, 0.5, 0.5)])
def test_ties_with_the_last_that_is_kept_are_kept(limits):
    rows = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0, 2.0], [5.0] * 7, [-3.0, -3.0, -1.0, -1.0, -2.0, -9.0, -1.0]])
    for row, out in zip(rows, truncated(rows, *[limits] * 3), strict=True):
        assert torch.equal(out.isfinite(), kept(row, *limits))


def test_impossible_tokens_and_odd_rows():
    rows = torch.full((4, 20), -torch.inf)
    rows[0, 3:6] = torch.tensor([0.0, 1.0, -1.0])
    rows[2, 7] = torch.inf
    rows[3, 1:3] = torch.tensor([torch.nan, 2.0])
    result = truncated(rows, *[(2, 0.9, 0.01)] * 4)
    assert result[0].isfinite().nonzero().flatten().tolist() == [3, 4]
    assert torch.equal(result[1:3], rows[1:3]) and result[3].isnan().any()
