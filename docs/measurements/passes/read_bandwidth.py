"""The bandwidth at which one rank reads memory. A pass of a few rows reads every weight once, so it is its limit.

Knows no model.
"""

from __future__ import annotations

import time
from statistics import median

import torch

_BYTES = 1 << 28
"""Read at a time: more than the caches of a core hold."""
_ROWS = 64


class ReadBandwidth:
    """Measured in turn with passes, by the threads that those have."""

    def __init__(self, device: torch.device) -> None:
        self._matrix = torch.ones(_ROWS, _BYTES // 4 // _ROWS, device=device)
        self._vector = torch.ones(self._matrix.shape[1], device=device)
        self._seconds: list[float] = []

    def measure(self) -> None:
        """Read the memory once: a product of a matrix and a vector, whose sums no pass can do without."""
        started = time.perf_counter()
        self._matrix.mv(self._vector)[0].item()
        self._seconds.append(time.perf_counter() - started)

    @property
    def bytes_per_s(self) -> float:
        """The median of all measurements."""
        return _BYTES / median(self._seconds)
