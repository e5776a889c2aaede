"""Two drafts in one tree: tokens in which they agree appear once, and where they differ both become siblings.

Which tokens are added depends on the tokens of the first tree: exact under the coupled rule only. Knows no drafter.
"""

from __future__ import annotations

from actors.drafters.path_tree import PathTree
from actors.protocol.messages import TokenTree


def merge_trees(first: TokenTree, second: TokenTree, room: int) -> TokenTree:
    """`first`, whose nodes keep their numbers, and at most `room` nodes of `second` that it lacks, parents first."""
    merged = PathTree(first, first.num_draft_tokens + room)
    place = {0: 0}
    for node in range(1, len(second.token_ids)):
        above = place.get(second.parents[node])  # none if that found no room
        if above is not None and (found := merged.add(above, second.token_ids[node])) >= 0:
            place[node] = found
    return merged.tree()
