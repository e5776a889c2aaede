"""Two drafts in one tree: tokens in which they agree appear once, and where they differ both become siblings.

Which tokens are added depends on the tokens of the first tree: exact under the coupled rule only. Knows no drafter.
"""

from __future__ import annotations

from actors.protocol.messages import TokenTree


def merge_trees(first: TokenTree, second: TokenTree, room: int) -> TokenTree:
    """`first`, whose nodes keep their numbers, and at most `room` nodes of `second` that it lacks, parents first."""
    token_ids, parents = list(first.token_ids), list(first.parents)
    child = {
        (parent, token): node
        for node, (parent, token) in reversed(list(enumerate(zip(parents, token_ids, strict=False))))
    }
    place = {0: 0}
    for node in range(1, len(second.token_ids)):
        if second.parents[node] not in place:
            continue  # its parent found no room
        key = (place[second.parents[node]], second.token_ids[node])
        if key not in child:
            if len(token_ids) - len(first.token_ids) >= room:
                continue
            child[key] = len(token_ids)
            parents.append(key[0])
            token_ids.append(key[1])
        place[node] = child[key]
    return TokenTree(tuple(token_ids), tuple(parents))
