"""Recursive rejection sampling on trees, top-down: each child is tested against the distribution it was drawn from.

On a chain this is standard speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318); with
independent siblings SpecInfer and MCSD (2305.09781, 2401.06706); without replacement RSD-C and Sequoia (2402.14160,
2402.12374). Schemes mix freely, since every child has its own conditional distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.protocol.messages import SparseDistribution, TokenTree
from actors.verification.distributions import Residual, TargetRow, child_distributions, walk_down
from actors.verification.random_source import RandomSource


def verify_rejection(
    tree: TokenTree,
    sampling_kinds: Sequence[int],
    distributions: Sequence[SparseDistribution | None],
    target_row: TargetRow,
    random_source: RandomSource,
) -> tuple[tuple[int, ...], int]:
    """(path, next_token): at each node accept a child with min(1, P/q), else subtract its distribution and try the
    next."""

    def test(node: int, siblings: Sequence[int]) -> int | np.ndarray:
        residual = Residual(target_row(node))
        drafts = child_distributions(tree, sampling_kinds, distributions[node], siblings)
        for child, draft in zip(siblings, drafts, strict=True):
            if random_source.accept(min(1.0, residual.probability(tree.token_ids[child]) / draft.own), child):
                return child
            residual.subtract(draft)
        return residual.weights

    return walk_down(tree, test, random_source)
