"""The token tree: proposed and verified as a whole, accepted along one path. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Tokens in topological order: `parents[i] < i`, `parents[0] == -1`; siblings are in the order they are tested."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]

    @staticmethod
    def root(token: int) -> TokenTree:
        """The empty proposal, which decodes plainly."""
        return TokenTree((token,), (-1,))

    @staticmethod
    def chain(root: int, draft: tuple[int, ...] | list[int]) -> TokenTree:
        return TokenTree((root, *draft), tuple(range(-1, len(draft))))

    @property
    def num_draft_tokens(self) -> int:
        return len(self.token_ids) - 1

    @property
    def is_chain(self) -> bool:
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    def depths(self) -> list[int]:
        """Distance of every node from the root."""
        depths = [0] * len(self.parents)
        for i in range(1, len(self.parents)):
            depths[i] = depths[self.parents[i]] + 1
        return depths

    def children(self) -> list[list[int]]:
        """Child indices of every node, in test order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for i in range(1, len(self.parents)):
            children[self.parents[i]].append(i)
        return children

    def path_to(self, node: int) -> list[int]:
        """Node indices from the first node below the root to `node`; empty for the root."""
        path = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def agreed_path(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The nodes below the root that a walk down by these tokens finds."""
        children, path = self.children(), list[int]()
        for token in token_ids:
            below = children[path[-1] if path else 0]
            child = next((child for child in below if self.token_ids[child] == token), None)
            if child is None:
                break
            path.append(child)
        return tuple(path)

    def agreed_depth(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens a walk down from the root finds."""
        return len(self.agreed_path(token_ids))

    def has_path(self, nodes: tuple[int, ...]) -> bool:
        """Whether each of these nodes is a child of the one before it, the first of them of the root."""
        parents, above = self.parents, 0
        for node in nodes:
            if not 0 < node < len(parents) or parents[node] != above:
                return False
            above = node
        return True

    def check(self) -> None:
        """Raise ValueError unless this is a tree in topological order."""
        if not self.token_ids or len(self.token_ids) != len(self.parents) or self.parents[0] != -1:
            raise ValueError("a token tree needs a root and one parent per node")
        for i in range(1, len(self.parents)):
            if not 0 <= self.parents[i] < i:
                raise ValueError(f"node {i} of the token tree names parent {self.parents[i]}")
