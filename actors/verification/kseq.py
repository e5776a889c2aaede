"""K-SEQ (SpecTr, arXiv 2310.15141): k independent drafts per node, tested one by one at a common discount rho.

Optimal transport with membership cost, approximated to within (1 - 1/e). Exact for independent siblings only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.verification.distributions import NO_MASS, Accepted, ChildDistribution, DrawnTree, TargetRow, walk_down
from actors.verification.random_source import RandomSource


def discount(target: np.ndarray, distribution: ChildDistribution, num_draws: int) -> tuple[float, float]:
    """(rho, beta): the least rho in [1, k] with 1 - (1 - beta)^k <= rho * beta, by bisection.

    beta = sum over x of min(p(x) / rho, q(x)) is the chance that a single draft is accepted.
    """

    def acceptance(rho: float) -> float:
        return float(np.minimum(target[distribution.token_ids] / rho, distribution.probs).sum())

    low, high = 1.0, float(num_draws)
    while low < (rho := (low + high) / 2) < high:
        beta = acceptance(rho)
        if 1.0 - (1.0 - beta) ** num_draws <= rho * beta:
            high = rho
        else:
            low = rho
    return high, acceptance(high)


def verify_kseq(draft: DrawnTree, target_row: TargetRow, random_source: RandomSource) -> Accepted:
    """(path, next_token): at each node the first child accepted with min(1, p / (rho q)) wins."""

    def test(target: np.ndarray, children: Sequence[ChildDistribution]) -> int | np.ndarray:
        if not children:
            return target
        rho, beta = discount(target, children[0], len(children))
        for child in children:
            if random_source.accept(min(1.0, float(target[child.token]) / (rho * child.own)), child.node):
                return child.node
        return _residual(target, children[0], rho, beta, len(children))

    return walk_down(draft, target_row, random_source, test)


def _residual(
    target: np.ndarray, distribution: ChildDistribution, rho: float, beta: float, num_draws: int
) -> np.ndarray:
    """p - min(p / rho, q) (1 - (1 - beta)^k) / beta, [V] unnormalised; p itself where nothing is left or lost."""
    residual = target.copy()
    if beta > 0:
        accepted = (
            np.minimum(target[distribution.token_ids] / rho, distribution.probs)
            * (1.0 - (1.0 - beta) ** num_draws)
            / beta
        )
        residual[distribution.token_ids] = np.maximum(residual[distribution.token_ids] - accepted, 0.0)
    return residual if residual.sum() > NO_MASS else target
