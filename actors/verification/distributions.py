"""What ratio tests compute with: the distribution of each child, the residual of the target's distribution, and the
walk of those that go from the root down.

Draft distributions are sparse, a target row is dense, both float64. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from actors.verification.random_source import RandomSource

TargetRow = Callable[[int], np.ndarray]
"""The target's distribution at a node, float64 [V], processed and normalised. Called only for visited nodes."""

Accepted = tuple[tuple[int, ...], int]
"""The path that a rule accepts, and the token that follows it."""

NO_MASS = 1e-15  # below it a residual is rounding: p and q were equal


@dataclass(frozen=True, slots=True)
class DrawnTree:
    """A draft as rules test it: the tree and how its nodes were drawn. Fields as in `Proposal`."""

    tree: TokenTree
    sampling_kinds: Sequence[int]
    distributions: Sequence[SparseDistribution | None]


class ChildDistribution:
    """The distribution of the child `node` given its earlier siblings: `probs[i]` for the i-th of distinct `token_ids`.

    `own` is the probability of the token that was drawn.
    """

    __slots__ = ("node", "own", "probs", "token", "token_ids")

    def __init__(self, token_ids: np.ndarray, probs: np.ndarray, token: int, node: int) -> None:
        self.token_ids, self.probs = token_ids, probs
        self.token, self.node = token, node
        self.own = float(probs[token_ids == token].sum())
        assert self.own > 0, f"token {token} cannot have been drawn from its distribution"


def child_distributions(draft: DrawnTree, node: int, children: Sequence[int]) -> list[ChildDistribution]:
    """The distributions of a node's `children`, in test order.

    Independent draws follow it as it is; draws without replacement follow it with their earlier siblings of the same
    kind removed and the rest renormalised; a token that was not drawn at random is one-hot.
    """
    result, distribution = [], draft.distributions[node]
    token_ids = remaining_ids = np.array(distribution.token_ids if distribution is not None else ())
    probs = remaining_probs = np.array(distribution.probs if distribution is not None else ())
    for child in children:
        token = draft.tree.token_ids[child]
        if draft.sampling_kinds[child] == SamplingKind.IID:
            result.append(ChildDistribution(token_ids, probs, token, child))
        elif draft.sampling_kinds[child] == SamplingKind.WITHOUT_REPLACEMENT:
            result.append(ChildDistribution(remaining_ids, remaining_probs / remaining_probs.sum(), token, child))
            rest = remaining_ids != token
            remaining_ids, remaining_probs = remaining_ids[rest], remaining_probs[rest]
        else:
            result.append(ChildDistribution(np.array([token]), np.ones(1), token, child))
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
    draft: DrawnTree,
    target_row: TargetRow,
    random_source: RandomSource,
    test: Callable[[np.ndarray, Sequence[ChildDistribution]], int | np.ndarray],
) -> Accepted:
    """(path, next_token): from the root to the child that `test` accepts, given the target's distribution at a node and
    those of its children, until it gives what the next token is drawn from instead, [V] unnormalised."""
    children, path, node = draft.tree.children(), list[int](), 0
    while True:
        found = test(target_row(node), child_distributions(draft, node, children[node]))
        if isinstance(found, np.ndarray):
            return tuple(path), random_source.sample(found, node)
        path.append(node := found)
