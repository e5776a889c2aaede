"""Batches of token sequences cut from a stream. Knows no model and no text."""

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
