"""Batches of token sequences cut from a stream, or drawn from rows of equal length. Knows no model and no text."""

from __future__ import annotations

import torch


class StreamBatches:
    """Cuts a token stream into sequences, each epoch at another offset and in another order."""

    def __init__(self, stream: torch.Tensor, seed: int) -> None:
        """Take a 1-D int64 stream; equal seeds give equal batches."""
        self._stream = stream
        self._random = torch.Generator().manual_seed(seed)
        self._length = 0
        self._starts = torch.empty(0, dtype=torch.long)
        self.epochs = 0.0
        """Passes over the stream so far."""

    def draw(self, size: int, length: int) -> torch.Tensor:
        """Return `[size, length + 1]` tokens: `length` inputs and their successors.

        Raises:
            ValueError: the stream is shorter than two sequences.
        """
        if len(self._stream) < 2 * (length + 1):
            raise ValueError(f"a stream of {len(self._stream)} tokens is too short for sequences of {length}")
        if length != self._length:
            self._length, self._starts = length, torch.empty(0, dtype=torch.long)
        while len(self._starts) < size:
            offset = int(torch.randint(length, (1,), generator=self._random))
            starts = torch.arange(offset, len(self._stream) - length, length)
            order = torch.randperm(len(starts), generator=self._random)
            self._starts = torch.cat((self._starts, starts[order]))
        chosen, self._starts = self._starts[:size], self._starts[size:]
        self.epochs += size * length / len(self._stream)
        return self._stream[chosen[:, None] + torch.arange(length + 1)]


class RowBatches:
    """Draws whole rows of a token table, each epoch in another order."""

    def __init__(self, rows: torch.Tensor, seed: int) -> None:
        """Take an int64 `[rows, length]` table; equal seeds give equal batches."""
        self._rows = rows
        self._random = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.long)

    def draw(self, size: int) -> torch.Tensor:
        """Return `[size, length]` tokens."""
        while len(self._order) < size:
            self._order = torch.cat((self._order, torch.randperm(len(self._rows), generator=self._random)))
        chosen, self._order = self._order[:size], self._order[size:]
        return self._rows[chosen]
