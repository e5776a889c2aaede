"""`strategy=dynamic`: trees of a whole batch compete for one budget of nodes and grow while a pass pays.

Best first over all requests: a node's value is the probability that the target's path goes through it. Only the nodes
that are among the best so far are fed, since no child is likelier than its parent. So a confident place gets one child
and an uncertain one several, and an easy request a deeper tree than a hard one. Growth ends when the next pass would
bring fewer tokens for its time than the round as a whole. Which tokens are dropped depends on their values: exact only
for draws that are not tested by ratio. A drafter that works ahead grows trees one by one and drafts as
`strategy=best_first`.

Sources: OPT-Tree (arXiv 2406.17276), DySpec (2410.11744); the stopping rule is DyTC's (2510.26843), for a tree.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.drafters.model.tree_growth import BestFirstGrowth, Candidate, GrowingTree
from actors.policy.estimators import OUTLIER, Ewma
from actors.protocol.messages import TokenTree

_MEMORY = 0.9
_FIRST = 3
"""Measurements of which the shortest counts, before a mean tells which times are outliers."""


@dataclass(slots=True)
class PassPrice:
    """Cost of a draft pass as a share of a round, measured by the drafter's clock; 0 until both were measured."""

    clock: Callable[[], float] = time.monotonic
    _pass_s: Ewma = field(default_factory=lambda: Ewma(_MEMORY))
    _round_s: Ewma = field(default_factory=lambda: Ewma(_MEMORY))
    _ordered_at: float = 0.0
    _pass_from: float = 0.0

    def draft_ordered(self) -> None:
        """The time since the last order is one round."""
        now = self.clock()
        if self._ordered_at:
            _observe(self._round_s, now - self._ordered_at)
        self._ordered_at = now

    def draft_started(self) -> None:
        """The text was fed; passes over new nodes follow."""
        self._pass_from = self.clock()

    def pass_done(self) -> None:
        """One more pass over new nodes ended."""
        now = self.clock()
        _observe(self._pass_s, now - self._pass_from)
        self._pass_from = now

    @property
    def share(self) -> float:
        return self._pass_s.mean / self._round_s.mean if self._round_s.mean else 0.0


def _observe(mean: Ewma, seconds: float) -> None:
    """Update a mean of times, in which idle rounds and pauses of the machine count as `OUTLIER` times the mean."""
    if mean.weight < _FIRST:
        mean.mean, mean.weight = min(seconds, mean.mean or seconds), mean.weight + 1
    else:
        mean.update(min(seconds, OUTLIER * mean.mean))


class DynamicGrowth(BestFirstGrowth):
    """`batch_nodes` bounds the nodes of all trees together; 0: only each tree's own budget does.

    `price` is the cost of a pass as a share of a round; it must be the same number on all ranks.
    """

    def __init__(self, depth: int, width: int, batch_nodes: int, price: Callable[[], float]) -> None:
        super().__init__(depth, width)
        self._batch_nodes = batch_nodes
        self._price = price

    def max_fed(self, budget: int) -> int:
        return (self.max_depth(budget) - 1) * budget

    def extend_all(
        self, trees: Sequence[GrowingTree], offered: Sequence[Sequence[Candidate]], budgets: Sequence[int]
    ) -> list[list[int]]:
        added = [[tree.add(one) for one in candidates] for tree, candidates in zip(trees, offered, strict=True)]
        kept = self._kept(trees, budgets)
        frontiers = [
            self._unless_last(tree, [node for node in nodes if node in best], budget)
            for tree, nodes, best, budget in zip(trees, added, kept, budgets, strict=True)
        ]
        room = min(sum(budgets), self._batch_nodes or sum(budgets))
        return frontiers if self._pays(trees, kept, frontiers, room) else [[] for _ in trees]

    def finish_all(self, trees: Sequence[GrowingTree], budgets: Sequence[int]) -> list[tuple[TokenTree, list[int]]]:
        kept = self._kept(trees, budgets)
        return [self.finish(tree, len(nodes)) for tree, nodes in zip(trees, kept, strict=True)]

    def _kept(self, trees: Sequence[GrowingTree], budgets: Sequence[int]) -> list[set[int]]:
        """The nodes of each tree within the budgets: the best of the tree, and of these the best of the batch."""
        best = []
        for i, (tree, budget) in enumerate(zip(trees, budgets, strict=True)):
            own = ((-tree.values[node], node, i) for node in range(1, len(tree.token_ids)))
            best += heapq.nsmallest(budget, own)
        kept: list[set[int]] = [set() for _ in trees]
        for _, node, i in heapq.nsmallest(self._batch_nodes or len(best), best):
            kept[i].add(node)
        return kept

    def _pays(
        self, trees: Sequence[GrowingTree], kept: Sequence[set[int]], frontiers: Sequence[Sequence[int]], room: int
    ) -> bool:
        """Whether one more pass is expected to add its share of the round's tokens.

        A child is estimated to be as likely as the mean step of the path to its parent. Where the budget is full, it
        replaces the least likely kept node.
        """
        if not any(frontiers):
            return False
        kept_chances = sorted(
            math.exp(tree.values[node]) for tree, nodes in zip(trees, kept, strict=True) for node in nodes
        )
        children = sorted(
            (
                math.exp(tree.values[node] * (1 + 1 / tree.depth(node)))
                for tree, nodes in zip(trees, frontiers, strict=True)
                for node in nodes
            ),
            reverse=True,
        )
        displaced = [0.0] * (room - len(kept_chances)) + kept_chances
        gain = sum(max(0.0, child - lost) for child, lost in zip(children, displaced, strict=False))
        return gain > self._price() * (len(trees) + sum(kept_chances))
