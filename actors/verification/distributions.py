"""What ratio tests compute with: the distribution of each child, the residual of the target's distribution, and the
walk of those that go from the root down.

Draft distributions are sparse, a target row is dense, both float64. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from actors.verification.random_source import RandomSource

TargetRow = Callable[[int], np.ndarray]
"""The target's distribution at a node, float64 [V], processed and normalised. Called only for visited nodes."""

NO_MASS = 1e-15  # below it a residual is rounding: p and q were equal


class ChildDistribution:
    """The distribution of one child given its earlier siblings: `probs[i]` for the i-th of distinct `token_ids`.

    `own` is the probability of the token that was drawn.
    """

    __slots__ = ("own", "probs", "token_ids")

    def __init__(self, token_ids: np.ndarray, probs: np.ndarray, token: int) -> None:
        self.token_ids = token_ids
        self.probs = probs
        self.own = float(probs[token_ids == token].sum())
        assert self.own > 0, f"token {token} cannot have been drawn from its distribution"


def child_distributions(
    tree: TokenTree, sampling_kinds: Sequence[int], distribution: SparseDistribution | None, children: Sequence[int]
) -> list[ChildDistribution]:
    """The distributions of one node's children, in test order; `distribution` is the draft's at the node.

    Independent draws follow it as it is; draws without replacement follow it with their earlier siblings of the same
    kind removed and the rest renormalised; a token that was not drawn at random is one-hot.
    """
    result = []
    token_ids = remaining_ids = np.array(distribution.token_ids if distribution is not None else ())
    probs = remaining_probs = np.array(distribution.probs if distribution is not None else ())
    for child in children:
        token = tree.token_ids[child]
        if sampling_kinds[child] == SamplingKind.IID:
            result.append(ChildDistribution(token_ids, probs, token))
        elif sampling_kinds[child] == SamplingKind.WITHOUT_REPLACEMENT:
            result.append(ChildDistribution(remaining_ids, remaining_probs / remaining_probs.sum(), token))
            rest = remaining_ids != token
            remaining_ids, remaining_probs = remaining_ids[rest], remaining_probs[rest]
        else:
            result.append(ChildDistribution(np.array([token]), np.ones(1), token))
    return result


class Residual:
    """A target distribution minus draft distributions, as unnormalised `weights` [V] and their `mass`.

    A subtraction changes the support of the draft distribution only; the dense row is summed, never rescaled.
    """

    __slots__ = ("_target", "mass", "weights")

    def __init__(self, target: np.ndarray) -> None:
        self._target = target
        self._restart()

    def _restart(self) -> None:
        self.weights = self._target.copy()
        self.mass = float(self.weights.sum())

    def probability(self, token: int) -> float:
        return float(self.weights[token]) / self.mass

    def subtract(self, distribution: ChildDistribution, scale: float = 1.0) -> float:
        """Become norm((scale * P - q)+) and return its mass before normalising; without mass, restart from the
        target."""
        kept = self.weights[distribution.token_ids] - distribution.probs * (self.mass / scale)
        self.weights[distribution.token_ids] = np.maximum(kept, 0.0)
        before, self.mass = self.mass, float(self.weights.sum())
        left = scale * self.mass / before
        if left <= NO_MASS:
            self._restart()
        return left


def walk_down(
    tree: TokenTree, test: Callable[[int, Sequence[int]], int | np.ndarray], random_source: RandomSource
) -> tuple[tuple[int, ...], int]:
    """(path, next_token): from the root to the child that `test` accepts of a node and its children, until it gives
    what the next token is drawn from instead, [V] unnormalised."""
    children, path, node = tree.children(), list[int](), 0
    while not isinstance(found := test(node, children[node]), np.ndarray):
        path.append(node := found)
    return tuple(path), random_source.sample(found, node)
