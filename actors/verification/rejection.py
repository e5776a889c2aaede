"""Recursive rejection sampling on trees, top-down: each child is tested against the distribution it was drawn from.

On a chain this is standard speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318); with
independent siblings SpecInfer and MCSD (2305.09781, 2401.06706); without replacement RSD-C and Sequoia (2402.14160,
2402.12374). Schemes mix freely, since every child has its own conditional distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.verification.distributions import Accepted, ChildDistribution, DrawnTree, Residual, TargetRow, walk_down
from actors.verification.random_source import RandomSource


def verify_rejection(draft: DrawnTree, target_row: TargetRow, random_source: RandomSource) -> Accepted:
    """(path, next_token): at each node accept a child with min(1, P/q), else subtract its distribution and try the
    next."""

    def test(target: np.ndarray, children: Sequence[ChildDistribution]) -> int | np.ndarray:
        residual = Residual(target)
        for child in children:
            if random_source.accept(min(1.0, residual.probability(child.token) / child.own), child.node):
                return child.node
            residual.subtract(child)
        return residual.weights

    return walk_down(draft, target_row, random_source, test)
