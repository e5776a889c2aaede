"""The target's features of the committed text of one sequence, as far as its speculator still needs them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from parallel.transfers import upload


class TextFeatures:
    """Rows of consecutive positions, the first of them `start`; `end` positions of the text have been read in all."""

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self._parts: list[Tensor] = []

    def append(self, start: int, rows: Tensor) -> None:
        """The rows [n, F] of positions `start` to `start + n`, which must follow those that were read."""
        assert start == self.end, f"features of position {start} came, those of {self.end} are next"
        self._parts.append(rows)
        self.end += len(rows)

    def rows(self, positions: Sequence[int]) -> Tensor:
        """The features at these positions, [n, F]; each must be within `start` to `end`."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        (rows,) = self._parts
        first, consecutive = positions[0], all(after == before + 1 for before, after in pairwise(positions))
        assert self.start <= min(positions) <= max(positions) < self.end, f"no features at {positions}"
        if consecutive:
            return rows[first - self.start : first - self.start + len(positions)]
        return rows[upload([position - self.start for position in positions], rows.device)]

    def forget(self, before: int) -> None:
        """Rows of earlier positions are not needed any more."""
        drop = min(before, self.end) - self.start
        if drop <= 0:
            return
        self.start += drop
        while drop and drop >= len(self._parts[0]):
            drop -= len(self._parts.pop(0))
        if drop:
            self._parts[0] = self._parts[0][drop:]
