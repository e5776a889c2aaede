"""How a draft tree grows: which candidate tokens become nodes, level by level. Pure host-side policy.

After every level a policy chooses the nodes to feed next; `finish` gives the tree to propose and, per kept node, its
index while growing. Knows tokens and their values, not where they come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from math import exp
from operator import mul

from actors.protocol.messages import TokenTree


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible child of a node; `log_prob` is the log-probability that it is accepted given its parent, `score` what
    a beam ranks its path by."""

    parent: int
    token: int
    log_prob: float
    score: float = 0.0


class GrowingTree:
    """Nodes in the order they were added, each with the log-probability of its whole path and its score."""

    def __init__(self, root: int) -> None:
        self.token_ids = [root]
        self.parents = [-1]
        self.values = [0.0]
        self.scores = [0.0]
        self.places = {0: 0}  # of each node in a fixed shape, where there is one
        self.gathered = 0.0  # expected accepted tokens, before the last level was added

    def add(self, candidate: Candidate) -> int:
        self.token_ids.append(candidate.token)
        self.parents.append(candidate.parent)
        self.values.append(self.values[candidate.parent] + candidate.log_prob)
        self.scores.append(candidate.score)
        return len(self.token_ids) - 1

    def depth(self, node: int) -> int:
        depth = 0
        while node > 0:
            node, depth = self.parents[node], depth + 1
        return depth


class Growth(ABC):
    """A growth policy. This base treats every tree of a batch by itself."""

    depth: int
    """Levels of nodes, at most."""

    @abstractmethod
    def width(self, level: int) -> int:
        """Children per node of this level."""

    @abstractmethod
    def extend(self, tree: GrowingTree, candidates: Sequence[Candidate], budget: int) -> list[int]:
        """Add a level of nodes to the tree; returns those to feed next, none at the end."""

    @abstractmethod
    def finish(self, tree: GrowingTree, budget: int) -> tuple[TokenTree, list[int]]:
        """What to propose, and the kept nodes as they were numbered while growing."""

    def max_depth(self, budget: int) -> int:
        """Depth of the deepest node that a proposal of `budget` draft tokens can have."""
        return min(budget, self.depth)

    def max_fed(self, budget: int) -> int:
        """Nodes that are fed for one tree, at most: those of all levels but the last."""
        return (self.max_depth(budget) - 1) * self.width(0)

    def _unless_last(self, tree: GrowingTree, level: list[int], budget: int) -> list[int]:
        """The nodes of a level if the proposal can have children of them, else none."""
        return level if level and tree.depth(level[0]) < self.max_depth(budget) else []

    def extend_all(
        self, trees: Sequence[GrowingTree], offered: Sequence[Sequence[Candidate]], budgets: Sequence[int]
    ) -> list[list[int]]:
        """`extend` for every tree."""
        return [self.extend(*tree) for tree in zip(trees, offered, budgets, strict=True)]

    def finish_all(self, trees: Sequence[GrowingTree], budgets: Sequence[int]) -> list[tuple[TokenTree, list[int]]]:
        """`finish` for every tree."""
        return [self.finish(*tree) for tree in zip(trees, budgets, strict=True)]


class StaticGrowth(Growth):
    """A fixed shape: every node of depth d gets `branching[d]` children, until the tree has `budget` nodes.

    Nodes are added in the order their tokens were drawn and none is dropped afterwards, so sampled draws stay exact
    under any rule. A chain is `branching = [1, 1, ...]`. With draws without replacement this is RSD-C (arXiv
    2402.14160), with independent ones SpecInfer and MCSD (2305.09781, 2401.06706).
    """

    def __init__(self, branching: Sequence[int]) -> None:
        self.depth = len(branching)
        self._branching = branching
        self._level_sizes = list(accumulate(branching, mul))

    def width(self, level: int) -> int:
        return self._branching[level]

    def max_fed(self, budget: int) -> int:
        return min(budget, sum(self._level_sizes[: self.max_depth(budget) - 1]))

    def extend(self, tree: GrowingTree, candidates: Sequence[Candidate], budget: int) -> list[int]:
        room = budget + 1 - len(tree.token_ids)
        added = [tree.add(candidate) for candidate in candidates[:room]]
        return self._unless_last(tree, added, budget) if len(added) < room else []

    def finish(self, tree: GrowingTree, budget: int) -> tuple[TokenTree, list[int]]:
        return TokenTree(tuple(tree.token_ids), tuple(tree.parents)), list(range(len(tree.token_ids)))


class BeamGrowth(StaticGrowth):
    """The `width` paths of each level with the highest score, of all nodes' candidates; nothing is dropped afterwards.

    Where the scores are those of `draw_beam`, this is stochastic beam search (RSD-S, arXiv 2402.14160):
    sequences drawn without replacement. Siblings are in decreasing order of their scores, which is the order in which
    they were drawn: exact under rejection and traversal.
    """

    def __init__(self, depth: int, width: int) -> None:
        super().__init__([width] * depth)
        self._level_sizes = [width] * depth

    def extend(self, tree: GrowingTree, candidates: Sequence[Candidate], budget: int) -> list[int]:
        best = sorted(candidates, key=lambda candidate: -candidate.score)[: self.width(0)]
        return super().extend(tree, best, budget)


class BestFirstGrowth(Growth):
    """Expand the `width` likeliest paths of each level, then keep the `budget` likeliest nodes of all.

    A node is never likelier than its parent, so the kept set is connected. Which tokens are dropped depends on their
    values: exact only for draws that are not tested by ratio. Source: EAGLE-2 (arXiv 2406.16858, section 4).

    With a `min_gain`, growth ends when a level raised the expected number of accepted tokens, the sum of the kept
    nodes' probabilities, by no more than that: OPT-Tree (2406.17276).
    """

    def __init__(self, depth: int, width: int, min_gain: float = 0.0) -> None:
        self.depth = depth
        self._width = width
        self._min_gain = min_gain

    def width(self, level: int) -> int:
        return self._width

    def extend(self, tree: GrowingTree, candidates: Sequence[Candidate], budget: int) -> list[int]:
        added = [tree.add(candidate) for candidate in candidates]
        if self._min_gain and not self._gains(tree, budget):
            return []
        best = sorted(sorted(added, key=lambda node: -tree.values[node])[: self._width])
        return self._unless_last(tree, best, budget)

    def _gains(self, tree: GrowingTree, budget: int) -> bool:
        """Whether the last level raised the expected number of accepted tokens by more than `min_gain`."""
        before, tree.gathered = tree.gathered, sum(map(exp, nlargest(budget, tree.values[1:])))
        return tree.gathered - before > self._min_gain

    def finish(self, tree: GrowingTree, budget: int) -> tuple[TokenTree, list[int]]:
        ranked = sorted(range(1, len(tree.token_ids)), key=lambda node: (-tree.values[node], node))
        kept = [0, *sorted(ranked[:budget])]
        place = {node: i for i, node in enumerate(kept)}
        parents = [-1, *(place[tree.parents[node]] for node in kept[1:])]
        return TokenTree(tuple(tree.token_ids[node] for node in kept), tuple(parents)), kept
