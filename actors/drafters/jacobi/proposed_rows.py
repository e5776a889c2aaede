"""The target's rows at the nodes of a drafter's own last trees, found in the top tokens of its passes.

Top tokens tell requests and lengths of texts apart, not proposals: of a tree that was not verified, or was verified by
another level, no rows are found. Knows trees and rows, not what a drafter makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.drafters.interface import Context
from actors.protocol.messages import TokenTree, TopTokens


@dataclass(frozen=True, slots=True)
class Rows:
    """The likeliest tokens after each node, [nodes, k], and their probabilities."""

    token_ids: np.ndarray
    probs: np.ndarray


class ProposedRows:
    """Keeps the latest tree of each request and, once the target has verified it, its rows."""

    def __init__(self) -> None:
        self._trees: dict[int, tuple[int, np.ndarray]] = {}  # length of the text, tokens of the tree
        self._rows: dict[int, Rows] = {}

    def proposed(self, context: Context, tree: TokenTree) -> None:
        """This tree is the draft for the text as it is now."""
        self._trees[context.request_id] = len(context.token_ids), np.array(tree.token_ids, np.int32)
        self._rows.pop(context.request_id, None)

    def read(self, top_tokens: TopTokens) -> None:
        """Keep the rows of trees that were proposed."""
        k, end = top_tokens.k, 0
        tokens = np.frombuffer(top_tokens.contexts, np.int32)[1::2]
        token_ids = np.frombuffer(top_tokens.token_ids, np.int32).reshape(-1, k)
        probs = np.frombuffer(top_tokens.probs, np.float32).reshape(-1, k)
        for request_id, prefix_len, num_rows in top_tokens.spans:
            end += num_rows
            of_len, nodes = self._trees.get(request_id, (-1, tokens[:0]))
            if of_len == prefix_len and len(nodes) <= num_rows:
                rows = slice(end - len(nodes), end)
                if np.array_equal(tokens[rows], nodes):
                    self._rows[request_id] = Rows(token_ids[rows], probs[rows])

    def take(self, context: Context) -> Rows | None:
        """The rows of the tree proposed for this text, once; None if they did not come."""
        of_len, _ = self._trees.pop(context.request_id, (-1, None))
        rows = self._rows.pop(context.request_id, None)
        return rows if of_len == len(context.token_ids) else None

    def release(self, request_id: int) -> None:
        """The request ended."""
        self._trees.pop(request_id, None)
        self._rows.pop(request_id, None)
