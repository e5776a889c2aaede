"""`drafter=recycling`: a tree of the candidates that the target ranked highest when each token was last verified.

No model, no device. One matrix for all requests of a client holds, for every token of the vocabulary, the target's
`width` likeliest next tokens at the last row that held this token; verdicts bring those rows, rejected nodes and
prompts included. A draft starts at the last token and follows the matrix along a fixed tree, one gather per depth.
Source: Luo et al., "Turning Trash into Treasure: Token Recycling" (arXiv 2408.08696).

The paper's tree has 80 nodes. Here the tree of a budget is the set of paths with the highest product of `RANK_SHARES`,
the measured share of rows at which the target's next token has a given rank; so any budget has its best tree.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache

import numpy as np

from actors.drafters.adjacency.config import RecyclingDrafterConfig
from actors.drafters.interface import Capabilities, Context, Draft, RequestwiseDrafter
from actors.drafters.scoped import ScopedMemory
from actors.protocol.messages import TokenTree, TopTokens

RANK_SHARES = (0.47, 0.095, 0.045, 0.027, 0.018, 0.015, 0.012, 0.010)
"""Share of verified rows at which the target's likeliest token had rank 0, 1, ... among the candidates of the row's
token: the bundled target, 16 prompts of each workload, greedy. Later ranks are taken to decay by a fifth each."""
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class TreeTemplate:
    """Node i is candidate `ranks[i]` of node `parents[i]`; `depths` are the slices of nodes of one depth, from 1."""

    parents: np.ndarray
    ranks: np.ndarray
    depths: tuple[slice, ...]
    parent_tuple: tuple[int, ...]


@cache
def tree_template(num_nodes: int, width: int) -> TreeTemplate:
    """The `num_nodes` likeliest paths of ranks below `width`."""
    shares = [*RANK_SHARES, *(RANK_SHARES[-1] * 0.8**i for i in range(1, width))][:width]
    chosen: list[tuple[int, ...]] = []
    offered: list[tuple[float, tuple[int, ...]]] = [(-shares[0], (0,))]
    while len(chosen) < num_nodes:
        value, path = heapq.heappop(offered)
        chosen.append(path)
        heapq.heappush(offered, (value * shares[0], (*path, 0)))
        if (rank := path[-1]) + 1 < width:
            heapq.heappush(offered, (value / shares[rank] * shares[rank + 1], (*path[:-1], rank + 1)))
    chosen.sort(key=lambda path: (len(path), path))
    place = {(): 0} | {path: i for i, path in enumerate(chosen, 1)}
    parents = (-1, *(place[path[:-1]] for path in chosen))
    sizes = np.bincount([len(path) for path in chosen])[1:]
    ends = np.cumsum(sizes) + 1
    depths = tuple(slice(int(end - size), int(end)) for size, end in zip(sizes, ends, strict=True))
    return TreeTemplate(np.array(parents), np.array([0, *(path[-1] for path in chosen)]), depths, parents)


class CandidateMatrix:
    """`rows` [tokens + 1, width] grow with the largest token seen; the last one, index -1, is that of no token."""

    def __init__(self, width: int) -> None:
        self.rows = np.full((1, width), _UNKNOWN, np.int32)

    def learn(self, top_tokens: TopTokens) -> None:
        """Replace the candidates of every row's token; of rows with one token the last counts."""
        width = min(top_tokens.k, self.rows.shape[1])
        tokens = np.frombuffer(top_tokens.contexts, np.int32)[1::2]
        candidates = np.frombuffer(top_tokens.token_ids, np.int32).reshape(-1, top_tokens.k)[:, :width]
        if not len(tokens):
            return
        if (largest := int(max(tokens.max(), candidates.max()))) >= len(self.rows) - 1:
            grown = np.full((largest + largest // 4 + 2, self.rows.shape[1]), _UNKNOWN, np.int32)
            grown[: len(self.rows) - 1] = self.rows[:-1]
            self.rows = grown
        self.rows[tokens, :width] = candidates


class RecyclingDrafter(RequestwiseDrafter):
    """Keeps nothing of a request."""

    def __init__(self, config: RecyclingDrafterConfig) -> None:
        self.capabilities = Capabilities(truncates=self, reads_top_tokens=self)
        self._width = config.width
        self.matrices = ScopedMemory(lambda: CandidateMatrix(config.width), config.share)

    def read_top_tokens(self, top_tokens: TopTokens) -> None:
        for scope, rows in top_tokens.by_scope():
            self.matrices.of(scope).learn(rows)

    def _propose(self, context: Context, budget: int) -> Draft:
        root, matrix = context.token_ids[-1], self.matrices.of(context.scope).rows
        if root >= len(matrix) - 1:
            return Draft.nothing(context)
        template = tree_template(budget, self._width)
        tokens = np.empty(len(template.parents), np.int64)
        tokens[0] = root
        for depth in template.depths:
            tokens[depth] = matrix[tokens[template.parents[depth]], template.ranks[depth]]
        known = tokens >= 0
        if known.all():
            return Draft.chosen(TokenTree(tuple(tokens.tolist()), template.parent_tuple))
        parents = (known.cumsum() - 1)[template.parents[known]]
        parents[0] = -1
        return Draft.chosen(TokenTree(tuple(tokens[known].tolist()), tuple(parents.tolist())))
