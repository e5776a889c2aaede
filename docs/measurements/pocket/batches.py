"""Training batches: windows of a token stream, and rows of tokens with the teacher's hidden states.

It must not know text, students or losses.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from cluster.tools.training.continuations import TextRows
from cluster.tools.training.speculators.frozen_target import FrozenTarget
from parallel.speculators.config import FINAL


class StreamBatches:
    """Cuts a token stream into sequences, each epoch at another offset and in another order."""

    def __init__(self, stream: torch.Tensor, seed: int) -> None:
        """Take a 1-D int64 stream; equal seeds give equal batches."""
        self._stream = stream
        self._random = torch.Generator().manual_seed(seed)
        self._length = 0
        self._starts = torch.empty(0, dtype=torch.long)

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream."""
        return {"random": self._random.get_state(), "starts": self._starts, "length": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place."""
        self._random.set_state(state["random"])
        self._starts, self._length = state["starts"], state["length"]

    def draw(self, size: int, length: int) -> torch.Tensor:
        """Return `[size, length + 1]` tokens: `length` inputs and their successors.

        ValueError if the stream is shorter than two sequences.
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
        return self._stream[chosen[:, None] + torch.arange(length + 1)]


class DistillationSet:
    """Draws rows in a new order each epoch, together with the teacher's last hidden states.

    Hidden states take a tenth of the memory of the teacher's distributions, which are one product away from them; all
    are kept, so that later epochs run no pass of the teacher.
    """

    def __init__(self, teacher: LlamaForCausalLM, rows: torch.Tensor, seed: int) -> None:
        """Take int64 `[rows, length]` tokens; equal seeds give equal batches.

        Memory: `2 * rows * length * hidden size` bytes on the CPU once every row was drawn.
        """
        labels = torch.full((len(rows),), rows.shape[1])
        self._rows = FrozenTarget(teacher, TextRows(rows, 0 * labels, labels), (FINAL,), cache_bytes=1 << 40)
        self._random = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.long)

    def state_dict(self) -> dict[str, Any]:
        """The place in the rows; hidden states are computed again."""
        return {"random": self._random.get_state(), "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place."""
        self._random.set_state(state["random"])
        self._order = state["order"]

    def draw(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[size, length]` tokens and `[size, length, hidden size]` hidden states of the teacher."""
        while len(self._order) < size:
            order = torch.randperm(len(self._rows.rows), generator=self._random)
            self._order = torch.cat((self._order, order))
        chosen, self._order = self._order[:size], self._order[size:]
        batch = self._rows.batch(chosen)
        return batch.tokens, batch.taps[FINAL]
