"""The randomness of the ratio tests: acceptance and residual draws, behind an interface that tests can enumerate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from actors.sampling.noise import NoiseStream, noise_key, uniform


class RandomSource(Protocol):
    """`node` distinguishes the decisions of one verification; a rule makes each decision at a node at most once."""

    def accept(self, probability: float, node: int) -> bool:
        """True with this probability."""
        ...

    def sample(self, weights: np.ndarray, node: int) -> int:
        """An index in proportion to `weights` [V]."""
        ...


@dataclass(frozen=True, slots=True)
class HashRandomSource:
    """Random numbers of one verification, keyed by (seed, stream, step, node); `step` is the committed length.

    Acceptance and residual have streams of their own, apart from the draft's, and no step repeats the numbers of
    another: rules that condition on everything they tested (block, traversal) are biased by any reuse.
    """

    seed: int
    step: int

    def accept(self, probability: float, node: int) -> bool:
        """Never for probability 0, always for 1: the uniform is in [0, 1)."""
        return uniform(noise_key(self.seed, NoiseStream.ACCEPT, self.step, node)) < probability

    def sample(self, weights: np.ndarray, node: int) -> int:
        """An index in proportion to `weights` [V], never one of weight 0."""
        cumulative = np.cumsum(weights)
        mark = self.mark(node) * cumulative[-1]
        return int(np.searchsorted(cumulative, mark, side="right"))  # the mark stays below the total, even rounded

    def mark(self, node: int) -> float:
        """Where in the mass of the weights a draw at this node falls, in [0, 1)."""
        return uniform(noise_key(self.seed, NoiseStream.RESIDUAL, self.step, node))
