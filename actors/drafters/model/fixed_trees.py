"""`drafter.tree=FILE`: trees of a fixed shape, the best ones for measured acceptance (Sequoia).

The file holds one tree for each number of nodes, so that a shorter draft is the best tree of its size. `job=tree`
measures how often the first, second, ... child of a node is the accepted one and writes the file; `best_trees` is the
dynamic program of the paper. A shape never depends on the tokens drawn, so it is exact under every rule.

Source: Sequoia (arXiv 2402.12374). Knows no model.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import numpy as np
from msgspec import Meta

from actors.drafters.model.tree_growth import Candidate, GrowingTree, StaticGrowth
from actors.protocol.messages import TokenTree
from parallel.typed_json import as_type, read_json
from parallel.whole_files import write_text

_FORMAT = "specdec trees 1"
MOST_NODES = 4096
"""Most nodes of a tree, its root among them."""
Shape = tuple[int, ...]
"""Parents of the nodes, in level order; -1 for the root."""


class TreeFields(TypedDict):
    format: Literal["specdec trees 1"]
    trees: Annotated[list[Annotated[list[int], Meta(min_length=2, max_length=MOST_NODES)]], Meta(min_length=1)]


def best_trees(acceptance: Sequence[float], num_nodes: int, depth: int) -> list[Shape]:
    """One tree for each number of draft tokens from 1 to `num_nodes`: of those with at most `depth` levels, the tree
    whose accepted path is longest on average.

    `acceptance[r]` is the probability that the child of rank r is the accepted one of its siblings, given that their
    parent is accepted; a node has at most as many children as there are ranks. A subtree of m nodes and l levels has
    value 1 + sum over its children of acceptance times the child's value; the best division of the nodes among the
    children is built up rank by rank.
    """
    most, ranks = num_nodes + 1, len(acceptance)
    best = np.ones((depth + 1, most + 1))  # [levels, nodes]: value of the best subtree with the root, which counts 1
    num_children = np.zeros((depth + 1, most + 1), int)
    share = np.zeros((depth + 1, ranks + 1, most + 1), int)  # nodes of the last child's subtree
    for levels in range(1, depth + 1):
        before = np.ones(most + 1)
        for rank, probability in enumerate(acceptance, start=1):
            value = np.full(most + 1, -np.inf)
            for nodes in range(1 + rank, most + 1):
                given = np.arange(1, nodes - rank + 1)  # each earlier sibling keeps at least one
                values = before[nodes - given] + probability * best[levels - 1, given]
                share[levels, rank, nodes] = given[chosen := int(np.argmax(values))]
                value[nodes] = values[chosen]
            is_better = value > best[levels]
            best[levels] = np.where(is_better, value, best[levels])
            num_children[levels] = np.where(is_better, rank, num_children[levels])
            before = value

    def shape(nodes: int) -> Shape:
        parents, level = [-1], [(0, depth, nodes)]
        while level:
            below = []
            for node, levels, size in level:
                sizes, left = [], size
                for rank in range(num_children[levels, size], 0, -1):
                    sizes.append(int(share[levels, rank, left]))
                    left -= sizes[-1]
                below += [(len(parents) + i, levels - 1, own) for i, own in enumerate(reversed(sizes))]
                parents += [node] * len(sizes)
            level = below
        return tuple(parents)

    return [shape(size + 1) for size in range(1, num_nodes + 1)]


def expected_accepted(shape: Shape, acceptance: Sequence[float]) -> float:
    """Mean number of accepted draft tokens of a tree."""
    ranks: Counter[int] = Counter()
    chances = [1.0]
    for parent in shape[1:]:
        chances.append(chances[parent] * acceptance[ranks[parent]])
        ranks[parent] += 1
    return sum(chances[1:])


def write_trees(path: Path, trees: Sequence[Shape], about: dict[str, object]) -> None:
    """`about` tells how the trees were made; it is not read."""
    write_text(path, json.dumps({"format": _FORMAT, **about, "trees": trees}) + "\n")


def read_trees(path: Path) -> list[Shape]:
    """The trees of a file; ValueError, one line, for another file."""
    try:
        content = as_type(read_json(path), TreeFields)
    except ValueError:
        raise ValueError("is no file of trees; make one with job=tree") from None
    trees = [tuple(parents) for parents in content["trees"]]
    for shape in trees:
        is_tree = shape[0] == -1 and all(0 <= p < i for i, p in enumerate(shape[1:], 1))
        if not is_tree or list(shape) != sorted(shape):
            raise ValueError(f"holds {str(list(shape))[:80]}, which gives no parents of a tree in level order")
    return trees


def _cut(shape: Shape, depth: int) -> Shape:
    """The tree without the nodes below that depth, which are the last ones."""
    depths = TokenTree(shape, shape).depths()
    return shape[: bisect_right(depths, depth)]


class FixedTreeGrowth(StaticGrowth):
    """The largest tree of the file within the budget; of a smallest tree that is too large, its first nodes. Nodes
    deeper than `longest` are left out."""

    def __init__(self, trees: Sequence[Shape], longest: int) -> None:
        self._trees = sorted({_cut(shape, longest) for shape in trees}, key=len)
        self._sizes = [len(shape) - 1 for shape in self._trees]
        children = [TokenTree(shape, shape).children() for shape in self._trees]
        depths = [TokenTree(shape, shape).depths() for shape in self._trees]
        widths = [0] * (1 + max(map(max, depths)))
        for of_tree, at in zip(children, depths, strict=True):
            for family, depth in zip(of_tree, at, strict=True):
                widths[depth] = max(widths[depth], len(family))
        super().__init__(widths[:-1])

    def max_depth(self, budget: int) -> int:
        return max(TokenTree(shape := self._shape(budget), shape).depths())

    def max_fed(self, budget: int) -> int:
        return len({*self._shape(budget)} - {-1, 0})

    def extend(self, tree: GrowingTree, candidates: Sequence[Candidate], budget: int) -> list[int]:
        shape = self._shape(budget)
        children = TokenTree(shape, shape).children()
        taken: Counter[int] = Counter()
        fed = []
        for candidate in candidates:
            family, rank = children[tree.places[candidate.parent]], taken[candidate.parent]
            if rank < len(family):
                taken[candidate.parent] += 1
                node = tree.add(candidate)
                tree.places[node] = family[rank]
                fed += [node] if children[family[rank]] else []
        return fed

    def _shape(self, budget: int) -> Shape:
        fitting = bisect_right(self._sizes, budget)
        return self._trees[fitting - 1] if fitting else self._trees[0][: budget + 1]
