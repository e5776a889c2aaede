"""The numbers of rows to which captured passes are rounded up, so that few sizes occur. Loads no PyTorch."""

from __future__ import annotations

_STEPPED_FROM = 256


def rounded_rows(num_rows: int) -> int:
    """A power of two; above 128 rows also three quarters of one. Few rows take as long as the reading of the matrices,
    however many they are filled up to, but the products of many take longer with each."""
    power = 1 << (num_rows - 1).bit_length()
    between = power * 3 // 4
    return between if power >= _STEPPED_FROM and num_rows <= between else power
