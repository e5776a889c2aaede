"""How many KV rows of a long text a draft model keeps or sees, and which models can. Loads no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from parallel.model.config import DecoderConfig

PAGES = 8
"""Parts of a window, of which one is freed at a time: a row is moved at most so often."""


@dataclass(frozen=True, slots=True)
class RowLimits:
    """`sinks` first rows and `window` newest ones."""

    sinks: int
    window: int

    @property
    def page(self) -> int:
        return max(1, self.window // PAGES)

    @property
    def most(self) -> int:
        """Committed rows of a sequence, at most, after a commit."""
        return self.sinks + self.window + self.page - 1

    @property
    def seen(self) -> int:
        """Rows of a long text that a pass reads, on average."""
        return self.sinks + self.window + self.page // 2

    def most_with(self, chunk: int, drafted: int) -> int:
        """Rows, committed or not, where passes feed up to `chunk` rows of text and drafts have up to `drafted`."""
        return self.most + max(chunk, drafted) + drafted

    def recent(self, num_rows: int) -> np.ndarray:
        """Indices of these among so many."""
        first = max(self.sinks, num_rows - self.window)
        return np.concatenate((np.arange(min(self.sinks, num_rows)), np.arange(first, num_rows)))


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """`num_chunks` of `size` rows, chosen again after `every` further rows, all of which are seen too."""

    size: int
    num_chunks: int
    every: int

    @property
    def seen(self) -> int:
        """Rows of a long text that a pass reads, on average, but for those passes that choose."""
        return self.size * self.num_chunks + self.every // 2

    @property
    def reach(self) -> int:
        """Chunks on either side of one that a choice counts too: as many as are read until the next choice."""
        return max(1, self.every // self.size)


def check_partial(config: DecoderConfig, limits: RowLimits | None = None) -> None:
    """ValueError, a clause, for a model whose rows cannot be moved to the places that `limits` leaves them or, without
    limits, seen in part."""
    moves = limits is not None
    if moves and config.rope is None:
        raise ValueError("the model has learned positions, which rows cannot be moved to; use rows=full or chunks")
    if not moves and config.windowed:
        raise ValueError("the model has layers with a sliding window, which counts all positions; use rows=full")
    if moves and limits.most > config.max_positions:
        remedy = "lower sinks and window"
        raise ValueError(f"{limits.most} rows are more than the model's {config.max_positions} positions; {remedy}")
