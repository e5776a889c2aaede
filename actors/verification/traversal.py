"""Traversal verification, bottom-up: a whole path is accepted or given up before its siblings are tried.

Traversal Verification (arXiv 2505.12398) with each child's own conditional law. On a chain it is block verification
(2403.10444), on a tree of one level recursive rejection. It conditions on everything it saw, so that draft and
acceptance noise must never be used twice (see `actors.sampling.noise.Stream`), and subtrees must not share draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actors.protocol.messages import SparseLaw, TokenTree
from actors.verification.distributions import NO_MASS, ChildLaw, Residual, TargetRow, child_laws
from actors.verification.random_source import Coins


def verify_traversal(
    tree: TokenTree, draws: Sequence[int], laws: Sequence[SparseLaw | None], target_row: TargetRow, coins: Coins
) -> tuple[tuple[int, ...], int]:
    """(path, next_token): walk to the first leaf, accept its path with what is left of it, else delete it and go on.

    A visited node keeps its residual and the probability `reach` that its path is accepted, given all that was
    deleted so far; the root's stays 1, so the walk ends.
    """
    children = tree.children()
    untested: dict[int, Iterator[tuple[int, ChildLaw]]] = {}
    residuals: dict[int, Residual] = {}
    reach = {0: 1.0}
    own_laws: dict[int, ChildLaw] = {}
    node = 0
    while True:
        if reach[node] > 0:
            if node not in residuals:
                residuals[node] = Residual(target_row(node))
                untested[node] = zip(children[node], child_laws(tree, draws, laws[node], children[node]))
            child, law = next(untested[node], (None, None))
            if child is not None:
                own_laws[child] = law
                reach[child] = min(1.0, reach[node] * residuals[node].probability(tree.token_ids[child]) / law.own)
                node = child
                continue
            if coins.accept(reach[node], node):
                return tuple(tree.path_to(node)), coins.sample(residuals[node].weights, node)
        parent = tree.parents[node]
        left = residuals[parent].subtract(own_laws[node], reach[parent])
        total = left + (1.0 - reach[parent])  # in this order, so that the root stays at 1
        reach[parent] = left / total if total > NO_MASS else 1.0
        node = parent
