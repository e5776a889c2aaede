"""Training batches: windows of a token stream, and rows of tokens with the teacher's hidden states.

It must not know text, students or losses.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from parallel.training.precision import fast_passes


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

    Hidden states take a tenth of the memory of the teacher's distributions, which are one product away from them. They
    are computed when a row is first drawn, so that later epochs run no pass of the teacher.
    """

    def __init__(self, teacher: LlamaForCausalLM, rows: torch.Tensor, seed: int) -> None:
        """Take int64 `[rows, length]` tokens; equal seeds give equal batches.

        Memory: `2 * rows * length * hidden size` bytes on the CPU once every row was drawn.
        """
        self._teacher = teacher
        self._rows = rows
        self._random = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.long)
        self._hidden = torch.empty(*rows.shape, teacher.config.hidden_size, dtype=torch.bfloat16)
        self._known = torch.zeros(len(rows), dtype=torch.bool)

    def state_dict(self) -> dict[str, Any]:
        """The place in the rows; hidden states are computed again."""
        return {"random": self._random.get_state(), "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place."""
        self._random.set_state(state["random"])
        self._order = state["order"]

    def draw(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[size, length]` tokens and `[size, length, hidden size]` bfloat16 hidden states of the teacher."""
        while len(self._order) < size:
            self._order = torch.cat((self._order, torch.randperm(len(self._rows), generator=self._random)))
        chosen, self._order = self._order[:size], self._order[size:]
        unknown = chosen[~self._known[chosen]]
        if len(unknown):
            self._hidden[unknown] = self._hidden_states(self._rows[unknown])
            self._known[unknown] = True
        return self._rows[chosen], self._hidden[chosen]

    @torch.no_grad()
    def _hidden_states(self, rows: torch.Tensor) -> torch.Tensor:
        device = self._teacher.device
        with fast_passes(device.type):
            hidden = self._teacher.model(input_ids=rows.to(device), use_cache=False).last_hidden_state
        return hidden.to("cpu", torch.bfloat16)
