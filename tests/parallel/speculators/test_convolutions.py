"""Convolutions along a block, against their definition row by row."""

from __future__ import annotations

import pytest
import torch

from parallel.speculators.block.convolutions import convolve


@pytest.mark.parametrize(("taps", "block_size"), [(1, 3), (2, 3), (3, 3), (4, 3), (3, 6)])
def test_a_row_reads_the_rows_before_it_in_its_block_and_no_other(taps: int, block_size: int) -> None:
    hidden, groups, num_rows = 6, 2, 6
    draw = torch.Generator().manual_seed(taps)
    x = torch.randn(num_rows, hidden, generator=draw)
    kernel = torch.randn(taps, hidden, generator=draw)
    added = torch.randn(num_rows, taps, groups, generator=draw)
    expected = torch.zeros_like(x)
    for row in range(num_rows):
        for tap in range(min(taps, row % block_size + 1)):
            for channel in range(hidden):
                weight = kernel[tap, channel] + added[row, tap, channel // (hidden // groups)]
                expected[row, channel] += weight * x[row - tap, channel]
    torch.testing.assert_close(convolve(x, kernel, added, block_size), expected)
