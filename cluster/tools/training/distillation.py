"""DistillationSet for a draft model: rows of tokens, and for each what the teacher thought at every position.

The teacher's last hidden state is kept instead of its distribution: a tenth of the size, and one product away from it.
It is computed when a row is first drawn, so that later epochs cost no teacher. Knows no student and no loss.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM


class DistillationSet:
    """Draws rows in a new order each epoch, together with the teacher's hidden states."""

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

    def draw(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[size, length]` tokens and `[size, length, hidden size]` bfloat16 hidden states of the teacher."""
        while len(self._order) < size:
            self._order = torch.cat((self._order, torch.randperm(len(self._rows), generator=self._random)))
        chosen, self._order = self._order[:size], self._order[size:]
        unknown = chosen[~self._known[chosen]]
        if len(unknown):
            self._hidden[unknown] = self._think(self._rows[unknown])
            self._known[unknown] = True
        return self._rows[chosen], self._hidden[chosen]

    @torch.no_grad()
    def _think(self, rows: torch.Tensor) -> torch.Tensor:
        device = self._teacher.device
        with torch.autocast(device.type, torch.bfloat16):
            hidden = self._teacher.model(input_ids=rows.to(device), use_cache=False).last_hidden_state
        return hidden.to("cpu", torch.bfloat16)
