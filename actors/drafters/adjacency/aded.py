"""`drafter=aded`: a tree of tri-grams, weighted by the target's distributions and by the tokens it emitted.

No model, no device. One table for all requests (`trigrams.py`) approximates the target's distribution after two
tokens. A draft is the tree of the paths with the highest product of followers' shares; the paper's tree search is an
option. Source: Adaptix, also known as ADED (arXiv 2407.12021), whose table comes from a corpus; here it may, and the
rows of verdicts and prompts add the target's own distributions.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Annotated

from actors.drafters.adjacency.tree_search import search_tree
from actors.drafters.adjacency.trigrams import WINDOW, TrigramTable
from actors.drafters.config import DrafterConfig, DraftSetup, PathResolver
from actors.drafters.interface import Capabilities, Context, Draft
from actors.protocol.messages import Commit, TokenTree, TopTokens
from actors.ranges import Range


class TreeConstruction(StrEnum):
    """How the tree is found in the table."""

    best_first = "best_first"
    search = "search"


@dataclass(frozen=True, slots=True)
class AdedDrafterConfig(DrafterConfig):
    """Tri-grams with the target's probabilities, nudged by what it emits."""

    name: str = "aded"
    num_draft_tokens: Annotated[int, Range(1, cap=1024, remedy="for none write drafter=none")] = 16
    """Nodes of the tree, at most; 64 as published."""
    construction: TreeConstruction = TreeConstruction.best_first
    """best_first: the likeliest paths; search: the paper's Monte Carlo tree search, a hundred times as slow."""
    min_probability: Annotated[float, Range(0, 1)] = 0.01
    """best_first leaves out paths less likely than this."""
    iterations: Annotated[int, Range(1)] = 150
    """Iterations of a search, each four tokens deep at most; 150 as published."""
    width: Annotated[int, Range(1, cap=64)] = 12
    """Followers kept for each pair of tokens; 12 as published."""
    max_pairs: Annotated[int, Range(1)] = 100_000
    """Pairs of tokens in the table, the one unchanged for longest dropped first; about 1 kB each."""
    learns: bool = True
    """Take the target's distribution at every verified row into the table; false: only the tokens it emits, and the
    corpus, as published."""
    reads_prompts: bool = True
    """Also at the rows of prompts. The target then computes logits at every token it reads."""
    corpus: str = ""
    """Text whose tri-grams fill the table at start: a text file, or JSONL with a `text` or `prompt` field; empty =
    none."""
    tokenizer: str = ""
    """Checkpoint directory whose tokenizer reads the corpus; empty = the target's."""

    @property
    def target_top_k(self) -> int:
        return self.width if self.learns else 0

    def with_paths(self, resolve: PathResolver, where: str = "drafter") -> DrafterConfig:
        if not self.corpus:
            return self
        tokenizer = resolve.checkpoint(f"{where}.tokenizer", self.tokenizer or resolve.target)
        corpus = resolve.file(f"{where}.corpus", self.corpus, "a text file, or JSONL with a `text` field")
        return replace(self, corpus=corpus, tokenizer=tokenizer)

    def build(self, setup: DraftSetup) -> tuple[AdedDrafter, dict[str, object]]:
        from actors.drafters.lookup.corpus import read_corpus  # loads the tokenizers library

        corpus = read_corpus(Path(self.corpus), Path(self.tokenizer)) if self.corpus else ()
        return AdedDrafter(self, corpus), {"corpus_tokens": sum(map(len, corpus))}


class AdedDrafter:
    """Requests share the table; nothing is kept of one."""

    def __init__(self, config: AdedDrafterConfig, corpus: Sequence[Sequence[int]] = ()) -> None:
        self.capabilities = Capabilities(truncates=self, reads_top_tokens=self)
        self.table = TrigramTable(config.max_pairs, config.width)
        self._config = config
        if corpus:
            self.table.count(corpus)

    def open(self, context: Context) -> None:
        """The tri-grams of a prompt are known before the first draft."""
        self.table.nudge(context.token_ids)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, context: Context, commit: Commit) -> None:
        """The target emitted these tokens."""
        self.table.nudge([*context.token_ids[-WINDOW:], *commit.token_ids][-WINDOW:])

    def truncate(self, context: Context) -> None:
        """Nothing to do: no text is kept."""

    def release(self, request_id: int) -> None:
        """Nothing to do."""

    def read_top_tokens(self, top_tokens: TopTokens) -> None:
        self.table.learn(top_tokens)

    def _propose(self, context: Context, budget: int) -> Draft:
        if len(context.token_ids) < 2:
            return Draft.nothing(context)
        before, root = context.token_ids[-2:]
        if self._config.construction is TreeConstruction.search:
            return Draft.chosen(search_tree(self.table, (before, root), budget, self._config.iterations, context.step))
        return Draft.chosen(self._best_first(before, root, budget))

    def _best_first(self, before: int, root: int, budget: int) -> TokenTree:
        """The likeliest paths; a node's next sibling is offered with its first child, so that few are looked at."""
        table, least = self.table, self._config.min_probability
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
