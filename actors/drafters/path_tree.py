"""A token tree under construction: a path that is entered twice is there once. Knows no drafter."""

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
