"""The target's distributions as ratio rules need them: each token that a draft names, and all others as one number.

A rule changes the probabilities of named tokens only. So it computes with a few numbers a node, on the host, while the
rows of the vocabulary stay on the device: tokens are renumbered node by node, the last number of a row is the sum over
all tokens without a name, and the token that ends the path is drawn on the device from the row with the rule's numbers
put in. On a GPU the numbers of all nodes of all sequences are one read and all draws are another; on a CPU, where a
read costs nothing, only visited nodes are computed. At a node whose distribution is impossible all mass is on
`NO_TOKEN`, which no draft names: to a rule it is a token like any other. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.protocol.messages import NO_TOKEN, SparseDistribution, TokenTree
from actors.verification.distributions import DrawnTree
from actors.verification.random_source import HashRandomSource
from parallel.transfers import to_device

_ROWS_AT_ONCE = 256
"""Rows of float64 in memory: 256 MB for a vocabulary of 128k."""


def renumbered(draft: DrawnTree) -> tuple[DrawnTree, list[np.ndarray]]:
    """The draft with tokens that are numbers within the names of their parent: the token ids that the draft names
    there, which are the second result."""
    tree = draft.tree
    tokens, renamed, names = list(tree.token_ids), list[SparseDistribution | None](), list[np.ndarray]()
    for own, children in zip(draft.distributions, tree.children(), strict=True):
        support = () if own is None else own.token_ids
        named = np.unique(np.array([*support, *(tree.token_ids[child] for child in children)], dtype=np.int64))
        for child in children:
            tokens[child] = int(np.searchsorted(named, tree.token_ids[child]))
        places = tuple(np.searchsorted(named, support).tolist())
        renamed.append(None if own is None else SparseDistribution(places, own.probs))
        names.append(named)
    return DrawnTree(TokenTree(tuple(tokens), tree.parents), draft.sampling_kinds, renamed), names


class DeferredDraw:
    """The randomness of one verification, which notes what to draw from instead of drawing it."""

    def __init__(self, source: HashRandomSource) -> None:
        self._source = source
        self.node = 0
        self.weights = np.empty(0)

    def accept(self, probability: float, node: int) -> bool:
        return self._source.accept(probability, node)

    def sample(self, weights: np.ndarray, node: int) -> int:
        self.node, self.weights = node, weights
        return -1

    def mark(self) -> float:
        """Where in the mass of the weights the draw falls."""
        return self._source.mark(self.node)


class TargetRows:
    """Processed logits [N, V] of the nodes of a pass and the `names` at each; `greedy` rows are one-hot. On a GPU one
    read brings the numbers of all rows."""

    def __init__(self, scores: Tensor, greedy: Sequence[bool], names: Sequence[np.ndarray]) -> None:
        self._scores = scores
        self._greedy = np.array(greedy, dtype=bool)
        self._names = names
        self._rows: dict[int, np.ndarray] = {}
        largest = scores.amax(-1)  # NaN in a row that has any
        if not _reads_ahead(scores):
            self._is_possible = largest.isfinite().numpy()
            return
        rows = range(len(names))
        parts = [self._compute(rows[i : i + _ROWS_AT_ONCE]) for i in range(0, len(rows), _ROWS_AT_ONCE)]
        numbers = torch.cat([largest.to(torch.float64), *parts]).cpu().numpy()
        self._is_possible = np.isfinite(numbers[: len(rows)])
        self._keep(rows, numbers[len(rows) :])

    def row(self, index: int) -> np.ndarray:
        """The probabilities of the names at a node and of all other tokens together."""
        if not self._is_possible[index]:
            return np.append(np.zeros(len(self._names[index])), 1.0)
        if index not in self._rows:
            self._keep([index], self._compute([index]).numpy())
        return self._rows[index]

    def draw(self, rows: Sequence[int], weights: Sequence[np.ndarray], marks: Sequence[float]) -> list[int]:
        """A token per row in proportion to its probabilities with `weights` in place of those of its names, `NO_TOKEN`
        where they are impossible."""
        places, columns = self._cells(rows)
        named = np.concatenate([own[:-1] for own in weights])
        arrays = [np.array(rows, dtype=np.int64), np.array(marks), places, columns, named]
        where, marked, row_cells, column_cells, values = to_device(arrays, self._scores.device)
        sums = self._probabilities(where, rows).index_put_((row_cells, column_cells), values).cumsum_(-1)
        drawn = torch.searchsorted(sums, marked[:, None] * sums[:, -1:], right=True)[:, 0].tolist()
        return [token if self._is_possible[row] else NO_TOKEN for row, token in zip(rows, drawn, strict=True)]

    def _compute(self, rows: Sequence[int]) -> Tensor:
        """The names' probabilities of all these rows, then the rows' sums over all other tokens; float64, flat.

        Zeroed before the sum, because the difference of two sums near one loses a small residual."""
        arrays = [np.array(rows, dtype=np.int64), *self._cells(rows)]
        where, row_cells, column_cells = to_device(arrays, self._scores.device)
        probs = self._probabilities(where, rows)
        named = probs[row_cells, column_cells]
        return torch.cat([named, probs.index_put_((row_cells, column_cells), probs.new_zeros(())).sum(-1)])

    def _keep(self, rows: Sequence[int], numbers: np.ndarray) -> None:
        """What `_compute` gave for these rows, chunk by chunk."""
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[first : first + _ROWS_AT_ONCE]
            sizes = [len(self._names[row]) for row in some]
            *named, rest, numbers = np.split(numbers, np.cumsum([*sizes, len(some)]))
            for row, own, others in zip(some, named, rest, strict=True):
                self._rows[row] = np.append(own, others)

    def _cells(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Row, counted within `rows`, and token of every name."""
        names = [self._names[row] for row in rows]
        return np.repeat(np.arange(len(rows)), [len(own) for own in names]), np.concatenate(names)

    def _probabilities(self, where: Tensor, rows: Sequence[int]) -> Tensor:
        """Float64 [n, V] of some rows."""
        scores = self._scores.index_select(0, where)
        greedy = np.flatnonzero(self._greedy[list(rows)])
        if len(greedy) == 0:
            return scores.softmax(-1, dtype=torch.float64)
        if len(greedy) == len(rows):
            probs = torch.zeros_like(scores, dtype=torch.float64)
            return probs.scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
        (places,) = to_device([greedy], scores.device)
        probs = scores.softmax(-1, dtype=torch.float64).index_fill_(0, places, 0.0)
        return probs.index_put_((places, scores.argmax(-1)[places]), probs.new_ones(()))


def _reads_ahead(logits: Tensor) -> bool:
    return not logits.is_cpu
