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
    best = 0
    depths = [0] * len(tree.parents)
    matched = [True] + [False] * (len(tree.parents) - 1)
    for node in range(1, len(tree.parents)):
        parent = tree.parents[node]
        if matched[parent] and tree.token_ids[node] == choices[parent] and node not in pruned:
            matched[node] = True
            depths[node] = depths[parent] + 1
            if depths[node] > depths[best]:
                best = node
    return tuple(tree.path_to(best)), choices[best]
