"""The coupled rule: the target's own draws are the output, and a draft is kept as long as it equals them.

Lossless for every proposal whatever, because the draw behind a node never looks at the tree; needs no draft
probabilities. Greedy verification is the same walk over arg-maxes. Pure and host-side: knows no tensor and no noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.protocol.messages import TokenTree


def verify_coupled(tree: TokenTree, choices: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """(path, next_token): from the root, follow the child that equals `choices[node]`, the target's draw behind node.

    Among siblings of one token the walk that gets furthest wins, the first of them on a tie.
    """
    best = 0
    depths = [0] * len(tree.parents)
    matched = [True] + [False] * (len(tree.parents) - 1)
    for node in range(1, len(tree.parents)):
        parent = tree.parents[node]
        if matched[parent] and tree.token_ids[node] == choices[parent]:
            matched[node] = True
            depths[node] = depths[parent] + 1
            if depths[node] > depths[best]:
                best = node
    return tuple(tree.path_to(best)), choices[best]
