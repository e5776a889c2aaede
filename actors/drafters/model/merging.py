"""`drafter.merge_ngram`: a draft graph. Paths of one length with the same recent tokens are fed as one.

Only the draft pass is shared: the first of such nodes, its leader, is fed, and the others take its logits. The proposal
is still a tree, in which every node keeps its own children, drawn for itself: their distribution is the leader's, which
is what the proposal states. Merging nodes of one depth only keeps the graph without cycles, and the position,
which keys the noise of the coupled rule, is the same.

GSD (arXiv 2407.16207) shares the drawn tokens too; two copies of one draw are biased under traversal.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.drafters.model.tree_growth import GrowingTree


def leaders(tree: GrowingTree, nodes: Sequence[int], length: int) -> dict[int, int]:
    """The leader of each node of one depth: the first of them whose last `length` tokens are the same; 0: itself."""
    if not length:
        return {node: node for node in nodes}
    first: dict[tuple[int, ...], int] = {}
    return {node: first.setdefault(_recent(tree, node, length), node) for node in nodes}


def _recent(tree: GrowingTree, node: int, length: int) -> tuple[int, ...]:
    tokens = []
    while node > 0 and len(tokens) < length:
        tokens.append(tree.token_ids[node])
        node = tree.parents[node]
    return tuple(tokens)
