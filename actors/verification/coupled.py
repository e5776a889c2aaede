"""The coupled rule: the output is the target's own draws, and a draft token is accepted if it equals the draw.

Lossless for every proposal, because the draw at a node does not depend on the tree; needs no draft probabilities.
Greedy verification is the same walk over arg-maxes. Knows no tensor and no noise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from actors.protocol.messages import TokenTree


def verify_coupled(
    tree: TokenTree, choices: Sequence[int], pruned: Collection[int] = ()
) -> tuple[tuple[int, ...], int]:
    """(path, next_token): from the root, follow the child that equals `choices[node]`, the target's draw at the node.

    A draw is `NO_TOKEN` where none is possible; no child equals that. Nodes that are `pruned` have no draw and are not
    followed. Of siblings with the same token the longest walk counts, on a tie the first.
    """
    best, deepest, parents, token_ids = 0, 0, tree.parents, tree.token_ids
    depths = [0] + [-1] * (len(parents) - 1)  # -1: not followed
    for node in range(1, len(parents)):
        parent = parents[node]
        depth = depths[parent]
        if depth >= 0 and token_ids[node] == choices[parent] and node not in pruned:
            depths[node] = depth = depth + 1
            if depth > deepest:
                best, deepest = node, depth
    return tuple(tree.path_to(best)), choices[best]
