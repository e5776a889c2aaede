"""Where a speculator runs, as the families that open one need it. Knows no family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from parallel.comm.group import Group
from parallel.model.decoder import Decoder
from parallel.model.layers.weight import TensorOptions


@dataclass(frozen=True, slots=True)
class SpeculatorPlace:
    """Where a speculator runs: beside the target's embedding and head, with so many KV rows.

    Matrices are stored as `weights`, None for `dtype`. `target_layers` is 0 if that is not known.
    """

    tables: Decoder
    group: Group
    device: torch.device | str
    dtype: torch.dtype
    num_slots: int
    weights: torch.dtype | None = None
    target_layers: int = 0

    @property
    def options(self) -> TensorOptions:
        return TensorOptions(dtype=self.dtype, device=self.device)

    def check_tables(self, directory: Path, vocab_size: int, hidden_size: int) -> None:
        """ValueError, one line, if the checkpoint in `directory` is of another vocabulary or width."""
        theirs, ours = (self.tables.config.vocab_size, self.tables.config.hidden_size), (vocab_size, hidden_size)
        if theirs != ours:
            raise ValueError(
                f"{directory}: (vocab_size, hidden_size) is {ours}, the target's {theirs}; they must be equal"
            )
