"""A token tree under construction: a path that is entered twice is there once, be it of another tree. Knows no
drafter."""

from __future__ import annotations

from actors.protocol.messages import TokenTree


class PathTree:
    """Begins as `tree`, whose nodes keep their numbers, and has at most `most` draft tokens; None: any number."""

    def __init__(self, tree: TokenTree, most: int | None = None) -> None:
        self.token_ids, self.parents = list(tree.token_ids), list(tree.parents)
        self._most = most
        self._nodes: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(self.parents, self.token_ids, strict=True)):
            self._nodes.setdefault(key, node)  # of equal siblings the first

    def add(self, parent: int, token: int) -> int:
        """The child of `parent` with this token; -1 if it is not there and has no room."""
        node = self._nodes.get((parent, token))
        if node is None:
            if self._most is not None and len(self.token_ids) > self._most:
                return -1
            node = self._nodes[parent, token] = len(self.token_ids)
            self.token_ids.append(token)
            self.parents.append(parent)
        return node

    def tree(self) -> TokenTree:
        return TokenTree(tuple(self.token_ids), tuple(self.parents))


def merge_trees(first: TokenTree, second: TokenTree, room: int) -> TokenTree:
    """`first`, whose nodes keep their numbers, and at most `room` nodes of `second` that it lacks, parents first. Which
    tokens are added depends on those of `first`: exact under the coupled rule only."""
    merged = PathTree(first, first.num_draft_tokens + room)
    place = {0: 0}
    for node in range(1, len(second.token_ids)):
        above = place.get(second.parents[node])  # none if that found no room
        if above is not None and (found := merged.add(above, second.token_ids[node])) >= 0:
            place[node] = found
    return merged.tree()
