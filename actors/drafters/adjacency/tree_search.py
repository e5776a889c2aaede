"""The tree search of ADED: the draft tree of a table of tri-grams by Monte Carlo tree search, as published.

Rolls out short texts from the table, prefers what a PUCT rule prefers, and drafts the most visited paths. An option
beside best-first construction, which finds better trees sooner. Source: Adaptix (arXiv 2407.12021); its released code
looks up the reward under the wrong token, so that nearly every reward is 1; here it is the published one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from actors.drafters.adjacency.trigrams import Pair, TrigramTable
from actors.drafters.path_tree import PathTree
from actors.protocol.messages import TokenTree

_C1, _C2 = 32.0, 8.0
_NUM_STATES = 4
"""Pairs of a trajectory, the root's included."""
_NUM_PATHS = 24
"""Most visited nodes that are drafted, each with its path and one more token."""


@dataclass(slots=True, eq=False)
class _Node:
    pair: Pair
    parent: _Node | None = None
    prior: float = 0.0
    visits: int = 0
    value: float = 0.0
    children: list[_Node] = field(default_factory=list)

    def score(self, num_parent_visits: int) -> float:
        """PUCT: mean reward, and a bonus for what is likely and was rarely visited."""
        if not self.visits:
            return math.inf
        explored = _C1 + math.log((num_parent_visits + _C2 + 1) / _C2)
        bonus = explored * self.prior * math.sqrt(num_parent_visits) / (1 + self.visits)
        return self.value / self.visits + bonus


def reward(table: TrigramTable, states: Sequence[Pair]) -> float:
    """One, and the weights of the tri-grams along the trajectory."""
    return 1.0 + sum(table.weight(pair, after[1]) for pair, after in pairwise(states))


def search_tree(table: TrigramTable, pair: Pair, budget: int, iterations: int, seed: int) -> TokenTree:
    """The tree of at most `budget` draft tokens after this pair, whose second token is the root."""
    choose, root = random.Random(seed), _Node(pair)
    visited: list[_Node] = []
    if table.followers(pair):
        for _ in range(iterations):
            _iterate(table, root, choose, visited)
    visited.sort(key=lambda node: -node.visits)  # stable: of equals the earlier
    tree = PathTree(TokenTree.root(pair[1]), budget)
    for node in visited[:_NUM_PATHS]:
        path, above = [], node
        while above.parent is not None:
            path.append(above.pair[1])
            above = above.parent
        path.reverse()
        path += [token for token, _ in table.followers(node.pair)[:1]]
        place = 0
        for token in path:
            if (place := tree.add(place, token)) < 0:
                break
    return tree.tree()


def _iterate(table: TrigramTable, root: _Node, choose: random.Random, visited: list[_Node]) -> None:
    """Select a node, expand it, roll out from its last child, and add the reward along the path."""
    node, states = root, [root.pair]
    while node.children and len(states) < _NUM_STATES:
        num_visits = node.visits
        node = max(node.children, key=lambda child: child.score(num_visits))
        states.append(node.pair)
    if len(states) < _NUM_STATES and (followers := table.followers(node.pair)):
        last = node.pair[1]
        node.children = [_Node((last, token), node, table.weight(node.pair, token)) for token, _ in followers]
        node = node.children[-1]
        states.append(node.pair)
    while len(states) < _NUM_STATES and (followers := table.followers(states[-1])):
        tokens, shares = zip(*followers, strict=True)
        states.append((states[-1][1], choose.choices(tokens, shares)[0]))
    gained = reward(table, states)
    step: _Node | None = node
    while step is not None:
        if not step.visits and step.parent is not None:
            visited.append(step)
        step.visits += 1
        step.value += gained
        step = step.parent
