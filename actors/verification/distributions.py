"""What ratio tests compute with: the law each child was drawn from, and the residual of the target's law.

Laws are sparse and in float64; a target row is dense. Knows no rule and no randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree

TargetRow = Callable[[int], np.ndarray]
"""The target's law behind a node, float64 [V], already processed and normalised. Asked only for visited nodes."""

NO_MASS = 1e-15  # below it a residual is rounding: p and q were equal


class ChildDistribution:
    """The law one child was drawn from, given its earlier siblings: `probs[i]` for the i-th of distinct `token_ids`.

    `own` is the probability of the token that was drawn.
    """

    __slots__ = ("own", "probs", "token_ids")

    def __init__(self, token_ids: np.ndarray, probs: np.ndarray, token: int) -> None:
        self.token_ids = token_ids
        self.probs = probs
        self.own = float(probs[token_ids == token].sum())
        assert self.own > 0, f"token {token} cannot have been drawn from its law"


def child_distributions(
    tree: TokenTree, sampling_kinds: Sequence[int], distribution: SparseDistribution | None, children: Sequence[int]
) -> list[ChildDistribution]:
    """The laws of one node's children, in test order; `distribution` is that of their parent context.

    Independent draws follow it as it is; draws without replacement follow it with their earlier siblings of the same
    kind removed and the rest renormalised; whatever was not drawn at random is one-hot.
    """
    result = []
    if distribution is not None:
        token_ids = remaining_ids = np.array(distribution.token_ids)
        probs = remaining_probs = np.array(distribution.probs)
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
    """A target law from which draft laws are subtracted, as unnormalised `weights` [V] and their `mass`.

    A subtraction touches the support of the draft law only; the dense row is summed, never rescaled.
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
        """Become norm((scale * P - q)+) and return the mass before that norm; without mass, the target's law again."""
        kept = self.weights[distribution.token_ids] - distribution.probs * (self.mass / scale)
        self.weights[distribution.token_ids] = np.maximum(kept, 0.0)
        before, self.mass = self.mass, float(self.weights.sum())
        left = scale * self.mass / before
        if left <= NO_MASS:
            self._restart()
        return left
