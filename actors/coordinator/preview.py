"""Drafts that draft-ahead prepared for a verdict still to come, as far as the coordinator holds them."""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import dataclass

from actors.protocol.draft_tree import DraftTree
from actors.protocol.messages import DraftPreview
from actors.protocol.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class PreviewTree:
    """The previewed tree of one request, and whether its proposals are chains or trees."""

    tree: DraftTree
    is_chain: bool

    @staticmethod
    def read(preview: DraftPreview) -> PreviewTree:
        return PreviewTree(DraftTree.read(preview.tree, preview.values), is_chain=not preview.values)

    def after(self, token_ids: Series[int]) -> PreviewTree | None:
        """What is prepared for a verdict that commits `token_ids`; None if nothing is."""
        node = self.tree.find(token_ids)
        if node is None or not self.tree.nodes[node].children:
            return None
        return PreviewTree(self.tree.reroot(node)[0], self.is_chain)

    def best(self, num_draft_tokens: int) -> TokenTree:
        """The likeliest proposal of so many draft tokens."""
        tree = self.tree
        return tree.proposal(tree.best_chain(num_draft_tokens) if self.is_chain else tree.best_nodes(num_draft_tokens))
