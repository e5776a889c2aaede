"""The only randomness of the ratio tests: coins and residual draws, behind two verbs that a test can enumerate."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from actors.sampling.noise import Stream, noise_key, uniform


class RandomSource(Protocol):
    """`node` tells apart the decisions of one verification; a rule asks each question of a node at most once."""

    def accept(self, probability: float, node: int) -> bool: ...

    def sample(self, weights: np.ndarray, node: int) -> int: ...


class HashRandomSource:
    """Coins of one verification, keyed by (seed, stream, step, node); `step` is the length of the committed prefix.

    Streams of acceptance and residual are apart from each other and from the draft's, and no step repeats the numbers
    of another: rules that condition on all they saw (block, traversal) are biased by any reuse.
    """

    def __init__(self, seed: int, step: int) -> None:
        self._seed = seed
        self._step = step

    def accept(self, probability: float, node: int) -> bool:
        """Never for probability 0, always for 1: the uniform is in [0, 1)."""
        return uniform(noise_key(self._seed, Stream.ACCEPT, self._step, node)) < probability

    def sample(self, weights: np.ndarray, node: int) -> int:
        """An index in proportion to `weights` [V], never one of weight 0."""
        cumulative = np.cumsum(weights)
        mark = uniform(noise_key(self._seed, Stream.RESIDUAL, self._step, node)) * cumulative[-1]
        return int(np.searchsorted(cumulative, mark, side="right"))  # the mark stays below the total, even rounded
