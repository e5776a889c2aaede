"""Traversal verification, bottom-up: a whole path is accepted or rejected before its siblings are tried.

Traversal Verification (arXiv 2505.12398) with each child's own conditional distribution. On a chain it is block
verification (2403.10444), on a tree of one level recursive rejection. It conditions on everything it tested, so draft
and acceptance noise must not be used twice (see `actors.sampling.noise.NoiseStream`), and subtrees must not share
draws.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.verification.distributions import (
    NO_MASS,
    Accepted,
    ChildDistribution,
    DrawnTree,
    Residual,
    TargetRow,
    child_distributions,
)
from actors.verification.random_source import RandomSource


def verify_traversal(draft: DrawnTree, target_row: TargetRow, random_source: RandomSource) -> Accepted:
    """(path, next_token): walk to the first leaf, accept its path with its remaining probability, else delete it.

    A visited node keeps its residual and the probability `reach` that its path is accepted, given all that was
    deleted so far; the root's stays 1, so the walk ends.
    """
    tree, children = draft.tree, draft.tree.children()
    untested: dict[int, Iterator[ChildDistribution]] = {}
    residuals: dict[int, Residual] = {}
    reach = {0: 1.0}
    own_distributions: dict[int, ChildDistribution] = {}
    node = 0
    while True:
        if reach[node] > 0:
            if node not in residuals:
                residuals[node] = Residual(target_row(node))
                untested[node] = iter(child_distributions(draft, node, children[node]))
            if (child := next(untested[node], None)) is not None:
                own_distributions[child.node] = child
                reach[child.node] = min(1.0, reach[node] * residuals[node].probability(child.token) / child.own)
                node = child.node
                continue
            if random_source.accept(reach[node], node):
                return tuple(tree.path_to(node)), random_source.sample(residuals[node].weights, node)
        parent = tree.parents[node]
        left = residuals[parent].subtract(own_distributions[node], reach[parent])
        total = left + (1.0 - reach[parent])  # in this order, so that the root stays at 1
        reach[parent] = left / total if total > NO_MASS else 1.0
        node = parent
