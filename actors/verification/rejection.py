"""Recursive rejection sampling on trees, top-down: each child is tested against the distribution it was drawn from.

On a chain this is standard speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318); with
independent siblings SpecInfer and MCSD (2305.09781, 2401.06706); without replacement RSD-C and Sequoia (2402.14160,
2402.12374). Schemes mix freely, since every child has its own conditional distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.protocol.messages import SparseDistribution, TokenTree
from actors.verification.distributions import Residual, TargetRow, child_distributions
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
    children = tree.children()
    path: list[int] = []
    node = 0
    while True:
        residual = Residual(target_row(node))
        for child, distribution in zip(
            children[node], child_distributions(tree, sampling_kinds, distributions[node], children[node]), strict=True
        ):
            if random_source.accept(min(1.0, residual.probability(tree.token_ids[child]) / distribution.own), child):
                path.append(child)
                node = child
                break
            residual.subtract(distribution)
        else:
            return tuple(path), random_source.sample(residual.weights, node)
