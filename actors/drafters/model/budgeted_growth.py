"""`strategy=dynamic`: trees of a whole batch that compete for one budget of nodes and grow while it pays.

Best first over all requests: a node's value is the probability that the target's path comes through it, and the nodes
that stand among the best so far are the only ones worth feeding, since no child is likelier than its parent. So a sure
place gets one child and an unsure one several, and an easy request a deeper tree than a hard one. Growth ends when the
next pass would bring fewer tokens for its time than the round as a whole does. Tokens are dropped by looking at them:
exact only for draws that are not tested by ratio. A drafter that works ahead has no moment at which all trees grow: it
drafts as `strategy=best_first` would.

Sources: OPT-Tree (arXiv 2406.17276), DySpec (2410.11744); the stopping rule is DyTC's (2510.26843), for a tree.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.drafters.model.tree_growth import BestFirstGrowth, Candidate, GrowingTree
from actors.protocol.messages import TokenTree

_MEMORY = 0.9
"""Weight of the past in the running means: about the last ten rounds count."""
_HICCUP = 2.0
"""What takes longer than so many times the mean is counted as that: nobody asked for a while, or the machine paused."""
_FIRST = 3
"""Measurements of which the shortest counts: there is no mean yet to tell what is long."""


@dataclass(slots=True)
class _Mean:
    """Running mean of times, 0 before the first."""

    seconds: float = 0.0
    num_seen: int = 0

    def update(self, seconds: float) -> None:
        self.num_seen += 1
        if self.num_seen <= _FIRST:
            self.seconds = min(seconds, self.seconds or seconds)
        else:
            self.seconds = _MEMORY * self.seconds + (1 - _MEMORY) * min(seconds, _HICCUP * self.seconds)


@dataclass(slots=True)
class PassPrice:
    """What a draft pass costs relative to a round, from the clock of the drafter; free until both are measured."""

    clock: Callable[[], float] = time.monotonic
    _pass: _Mean = field(default_factory=_Mean)
    _round: _Mean = field(default_factory=_Mean)
    _asked_at: float = 0.0
    _passed_at: float = 0.0

    def asked(self) -> None:
        """A draft was ordered: the time since the last order was one round."""
        now = self.clock()
        if self._asked_at:
            self._round.update(now - self._asked_at)
        self._asked_at = now

    def started(self) -> None:
        """The text was read: what follows are passes over new nodes only."""
        self._passed_at = self.clock()

    def passed(self) -> None:
        """One more pass of this draft is done."""
        now = self.clock()
        self._pass.update(now - self._passed_at)
        self._passed_at = now

    @property
    def share(self) -> float:
        """A pass as a part of a round."""
        return self._pass.seconds / self._round.seconds if self._round.seconds else 0.0


class DynamicGrowth(BestFirstGrowth):
    """`batch_nodes` bounds the nodes of all trees together; 0 leaves every tree its own budget only.

    `price` tells what a pass costs as a part of a round; on several ranks it must be the same number on all.
    """

    def __init__(self, depth: int, width: int, batch_nodes: int, price: Callable[[], float]) -> None:
        super().__init__(depth, width)
        self._batch_nodes = batch_nodes
        self._price = price

    def extend_all(
        self, trees: Sequence[GrowingTree], offered: Sequence[Sequence[Candidate]], budgets: Sequence[int]
    ) -> list[list[int]]:
        added = [[tree.add(one) for one in candidates] for tree, candidates in zip(trees, offered, strict=True)]
        kept = self._kept(trees, budgets)
        frontiers = [[node for node in nodes if node in best] for nodes, best in zip(added, kept, strict=True)]
        room = min(sum(budgets), self._batch_nodes or sum(budgets))
        return frontiers if self._pays(trees, kept, frontiers, room) else [[] for _ in trees]

    def finish_all(self, trees: Sequence[GrowingTree], budgets: Sequence[int]) -> list[tuple[TokenTree, list[int]]]:
        kept = self._kept(trees, budgets)
        return [self.finish(tree, len(nodes)) for tree, nodes in zip(trees, kept, strict=True)]

    def _kept(self, trees: Sequence[GrowingTree], budgets: Sequence[int]) -> list[set[int]]:
        """The nodes of each tree that the budgets have room for: its own best, and the best of all."""
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

        A child is taken to be as likely as the mean step of the path to its parent; where the budget is full, it
        replaces the least likely of what is kept.
        """
        if not any(frontiers):
            return False
        standing = sorted(
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
        displaced = [0.0] * (room - len(standing)) + standing
        gain = sum(max(0.0, child - lost) for child, lost in zip(children, displaced, strict=False))
        return gain > self._price() * (len(trees) + sum(standing))
