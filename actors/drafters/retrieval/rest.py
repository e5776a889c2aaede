"""`drafter=rest`: retrieval. A tree of what followed the longest suffix of the text in a datastore, by frequency.

No model, no device, nothing kept between rounds. The datastore (`datastore.py`) is a file of `job=datastore`; it is
mapped, not read, so that processes share one copy. Source: He et al., "REST: Retrieval-Based Speculative Decoding"
(arXiv 2311.08252).
"""

from __future__ import annotations

import numpy as np

from actors.drafters.interface import Capabilities, Context, Draft, RequestwiseDrafter
from actors.drafters.retrieval.config import RestDrafterConfig
from actors.drafters.retrieval.datastore import SEPARATOR, Datastore
from actors.protocol.messages import TokenTree


class RestDrafter(RequestwiseDrafter):
    """Drafts the most frequent continuations, merged to a tree."""

    def __init__(self, config: RestDrafterConfig, store: Datastore) -> None:
        self.capabilities = Capabilities(truncates=self)
        self._config = config
        self._store = store

    def _propose(self, context: Context, budget: int) -> Draft:
        config, store = self._config, self._store
        latest = context.token_ids[-config.longest_match :]
        matched, low, high = store.longest_match(latest, config.shortest_match, config.longest_match)
        if not matched:
            return Draft.nothing(context)
        texts = store.continuations(matched, low, high, config.depth, config.max_matches)
        return Draft.chosen(frequent_tree(latest[-1], texts, budget))


def frequent_tree(root: int, texts: np.ndarray, budget: int) -> TokenTree:
    """The `budget` most frequent prefixes of these texts [n, depth], which are in lexicographic order, as a tree.

    Equal prefixes are neighbours, so a prefix is a run of rows. A parent is at least as frequent as its child and comes
    first where they are equal, so the chosen prefixes are a tree.
    """
    differs = texts[1:] != texts[:-1]
    begins = np.ones(texts.shape, bool)
    begins[1:] = np.logical_or.accumulate(differs, axis=1)
    begins &= texts != SEPARATOR
    depths, rows = np.nonzero(begins.T)  # by depth, then in order of the texts: run i is a node
    if not len(depths):
        return TokenTree.root(root)
    nodes = np.cumsum(begins.T.ravel()).reshape(begins.T.shape)  # at [depth, row]: number of the node, from 1
    nodes[texts.T == SEPARATOR] = 0
    counts = np.bincount(nodes.ravel(), minlength=len(depths) + 1)[1:]
    parents = np.where(depths > 0, nodes[np.maximum(depths - 1, 0), rows], 0)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:budget])
    place = np.zeros(len(depths) + 1, np.int64)
    place[chosen + 1] = np.arange(1, len(chosen) + 1)
    tokens = texts[rows[chosen], depths[chosen]]
    return TokenTree((root, *tokens.tolist()), (-1, *place[parents[chosen]].tolist()))
