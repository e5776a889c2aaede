"""What passes to time: the models, the ways to share them, and the rows of a pass. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from actors.options import DEVICES, DTYPES, MAX_RANKS, WEIGHTS
from parallel.ranges import OneOf, Range, Section, require


@dataclass(frozen=True, slots=True)
class PassesConfig(Section):
    """Time one pass of a draft model, with random weights, in every way its ranks could share it."""

    models: list[str] = field(default_factory=lambda: ["5M", "30M"])
    """Draft models: a checkpoint directory, its config.json, or 5M and 30M for models of that many parameters."""
    ranks: Annotated[int, Range(1, cap=MAX_RANKS)] = 2
    """Ranks that share the model; on a CPU each has a core of its own."""
    layer_groups: Annotated[list[int], Range(1)] = field(default_factory=lambda: [2])
    """Layers side by side to time, each at most `ranks`."""
    rows: Annotated[list[int], Range(1, filled=True)] = field(default_factory=lambda: [1, 8])
    """Tokens of a pass."""
    context: Annotated[int, Range(1)] = 128
    """Tokens in the KV cache before the pass."""
    dtype: Annotated[str, OneOf(DTYPES)] = "auto"
    """Type of the numbers, as `drafter.dtype`."""
    weights: Annotated[str, OneOf(WEIGHTS)] = "auto"
    """How matrices are stored, as `drafter.weights`."""
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    """cpu, cuda, or auto: GPUs if there are as many as ranks."""
    repeats: Annotated[int, Range(1)] = 60
    """Timed passes of each kind; medians are reported."""

    def check_fields(self, where: str) -> None:
        groups, remedy = self.layer_groups, f"must all be between 1 and {where}.ranks={self.ranks}"
        fits = self.ranks == 1 or max(groups, default=1) <= self.ranks  # one rank shares with none
        require(fits, f"{where}.layer_groups", groups, remedy)
