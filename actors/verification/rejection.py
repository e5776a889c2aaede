"""Recursive rejection sampling on trees, top-down: each child is tested against the law it was really drawn from.

On a chain this is standard speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318); with
independent siblings SpecInfer and MCSD (2305.09781, 2401.06706); without replacement RSD-C and Sequoia (2402.14160,
2402.12374). Schemes mix freely, as every child brings its own conditional law.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.protocol.messages import SparseLaw, TokenTree
from actors.verification.distributions import Residual, TargetRow, child_laws
from actors.verification.random_source import Coins


def verify_rejection(
    tree: TokenTree, draws: Sequence[int], laws: Sequence[SparseLaw | None], target_row: TargetRow, coins: Coins
) -> tuple[tuple[int, ...], int]:
    """(path, next_token): at each node accept a child with min(1, P/q), else subtract its law and try the next."""
    children = tree.children()
    path: list[int] = []
    node = 0
    while True:
        residual = Residual(target_row(node))
        for child, law in zip(children[node], child_laws(tree, draws, laws[node], children[node])):
            if coins.accept(min(1.0, residual.probability(tree.token_ids[child]) / law.own), child):
                path.append(child)
                node = child
                break
            residual.subtract(law)
        else:
            return tuple(path), coins.sample(residual.weights, node)
