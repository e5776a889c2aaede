"""`drafter=aded`: a tree of tri-grams, weighted by the target's distributions and by the tokens it emitted.

No model, no device. One table for all requests of a client (`trigrams.py`) approximates the target's distribution after
two tokens. A draft is the tree of the paths with the highest product of followers' shares; the paper's tree search is
an option. Source: Adaptix, also known as ADED (arXiv 2407.12021), whose table comes from a corpus; here it may, and the
rows of verdicts and prompts add the target's own distributions.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

from actors.drafters.adjacency.config import AdedDrafterConfig, TreeConstruction
from actors.drafters.adjacency.tree_search import search_tree
from actors.drafters.adjacency.trigrams import WINDOW, TrigramTable
from actors.drafters.interface import Capabilities, Context, Draft, RequestwiseDrafter
from actors.drafters.scoped import ScopedMemory
from actors.protocol.messages import Commit, TokenTree, TopTokens


class AdedDrafter(RequestwiseDrafter):
    """Keeps nothing of a request; those of a client share a table."""

    def __init__(self, config: AdedDrafterConfig, corpus: Sequence[Sequence[int]] = ()) -> None:
        self.capabilities = Capabilities(truncates=self, reads_top_tokens=self)
        self._config = config
        of_corpus = TrigramTable(config.max_pairs, config.width)
        of_corpus.count(corpus)
        self.tables = ScopedMemory(of_corpus.copy, config.share)

    def open(self, context: Context) -> None:
        """The tri-grams of a prompt are known before the first draft."""
        self.tables.of(context.scope).nudge(context.token_ids)

    def observe(self, context: Context, commit: Commit) -> None:
        """The target emitted these tokens."""
        self.tables.of(context.scope).nudge([*context.token_ids[-WINDOW:], *commit.token_ids][-WINDOW:])

    def read_top_tokens(self, top_tokens: TopTokens) -> None:
        for scope, rows in top_tokens.by_scope():
            self.tables.of(scope).learn(rows)

    def _propose(self, context: Context, budget: int) -> Draft:
        if len(context.token_ids) < 2:
            return Draft.nothing(context)
        before, root = context.token_ids[-2:]
        table = self.tables.of(context.scope)
        if self._config.construction is TreeConstruction.search:
            return Draft.chosen(search_tree(table, (before, root), budget, self._config.iterations, context.step))
        return Draft.chosen(self._best_first(table, before, root, budget))

    def _best_first(self, table: TrigramTable, before: int, root: int, budget: int) -> TokenTree:
        """The likeliest paths; a node's next sibling is offered with its first child, so that few are looked at."""
        least = self._config.min_probability
        token_ids, parents = [root], [-1]
        ages = count()
        # (-probability, age, parent node, probability of the parent, its followers, rank among them)
        offered: list[tuple[float, int, int, float, list[tuple[int, float]], int]] = []

        def offer(parent: int, chance: float, followers: list[tuple[int, float]], rank: int) -> None:
            if rank < len(followers) and (value := chance * followers[rank][1]) >= least:
                heapq.heappush(offered, (-value, next(ages), parent, chance, followers, rank))

        offer(0, 1.0, table.followers((before, root)), 0)
        while offered and len(token_ids) <= budget:
            value, _, parent, chance, followers, rank = heapq.heappop(offered)
            token = followers[rank][0]
            offer(parent, chance, followers, rank + 1)
            offer(len(token_ids), -value, table.followers((token_ids[parent], token)), 0)
            token_ids.append(token)
            parents.append(parent)
        return TokenTree(tuple(token_ids), tuple(parents))
