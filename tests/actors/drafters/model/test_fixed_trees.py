"""Sequoia's trees: the dynamic program against every tree and the golden numbers, and the file."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import product

import pytest

from actors.drafters.model.fixed_trees import FixedTreeGrowth, best_trees, expected_accepted, read_trees, write_trees
from actors.drafters.model.tree_growth import Candidate, GrowingTree
from actors.protocol.messages import TokenTree

GOLDEN = (0.7, 0.12, 0.18)
"""Acceptance by rank of p=(.5,.3,.2) and q=(.2,.3,.5) without replacement, at every position."""


@pytest.mark.parametrize(
    ("shape", "accepted"),
    [((-1, 0, 0), 0.82), ((-1, 0, 0, 1, 2), 1.394), ((-1, 0, 0, 1, 1, 2, 2), 1.4924), ((-1, 0, 0, 0), 1.0)],
)
def test_the_value_of_a_tree_is_that_of_the_enumeration(shape, accepted):
    """The golden numbers of rejection in tests/actors/verification, from acceptance by rank alone."""
    assert expected_accepted(shape, GOLDEN) == pytest.approx(accepted, abs=1e-12)


@cache
def every_tree(num_nodes: int) -> set[tuple[int, ...]]:
    """Parents in level order of all trees of so many draft tokens."""
    choices = product(*(range(i) for i in range(1, num_nodes + 1)))
    return {(-1, *parents) for parents in choices if list(parents) == sorted(parents)}


@pytest.mark.parametrize("seed", range(6))
def test_the_dynamic_program_finds_the_best_of_all_trees(seed):
    choose = random.Random(seed)
    acceptance = [choose.random() * 0.6**rank for rank in range(choose.randint(1, 4))]
    depth = choose.randint(1, 4)
    for size, shape in enumerate(best_trees(acceptance, 6, depth), start=1):
        allowed = [
            tree
            for tree in (one for n in range(1, size + 1) for one in every_tree(n))
            if max(TokenTree(tree, tree).depths()) <= depth
            and max(map(len, TokenTree(tree, tree).children())) <= len(acceptance)
        ]
        assert shape in allowed
        best = max(expected_accepted(tree, acceptance) for tree in allowed)
        assert expected_accepted(shape, acceptance) == pytest.approx(best, abs=1e-12)


def test_a_sure_drafter_gets_a_chain_and_an_unsure_one_a_star():
    assert best_trees([0.9, 0.05], 4, 4)[-1] == (-1, 0, 1, 2, 3)
    assert best_trees([0.2, 0.19, 0.18, 0.17], 4, 4)[-1] == (-1, 0, 0, 0, 0)
    assert best_trees([0.6], 5, 2)[-1] == (-1, 0, 1), "neither deeper nor wider than allowed"


def grow(growth, budget):
    """Grows a tree to its end; every node has as many candidates as asked for."""
    tree, frontier, fed = GrowingTree(9), [0], 0
    for level in range(growth.depth):
        offered = [Candidate(node, 10 * node + i, 0.0) for node in frontier for i in range(growth.width(level))]
        frontier = growth.extend(tree, offered, budget)
        fed += len(frontier)
    return growth.finish(tree, budget)[0], fed


def test_the_tree_of_the_largest_size_within_the_budget_is_grown():
    shapes = [(-1, 0), (-1, 0, 0, 1), (-1, 0, 0, 0, 1, 1, 3, 4)]
    growth = FixedTreeGrowth(shapes, 9)
    for budget, shape in {1: shapes[0], 2: shapes[0], 3: shapes[1], 6: shapes[1], 7: shapes[2], 20: shapes[2]}.items():
        tree, fed = grow(growth, budget)
        assert tree.parents == shape and fed == growth.max_fed(budget)
        assert max(tree.depths()) == growth.max_depth(budget)
    assert grow(FixedTreeGrowth(shapes[2:], 9), 4)[0].parents == (-1, 0, 0, 0, 1), (
        "the only one is too large: its begin"
    )


def test_no_node_is_deeper_than_the_drafter_can_draft():
    growth = FixedTreeGrowth([(-1, 0), (-1, 0, 0, 1, 1, 3)], longest=2)
    assert growth.depth == 2 and grow(growth, 9)[0].parents == (-1, 0, 0, 1, 1)


def test_a_law_that_runs_short_loses_its_last_children_only():
    growth, tree = FixedTreeGrowth([(-1, 0, 0, 0, 1, 2, 3)], 9), GrowingTree(9)
    assert growth.extend(tree, [Candidate(0, 5, 0.0), Candidate(0, 6, 0.0)], 6) == [1, 2]
    assert growth.extend(tree, [Candidate(1, 7, 0.0), Candidate(1, 8, 0.0), Candidate(2, 9, 0.0)], 6) == []
    assert growth.finish(tree, 6)[0].parents == (-1, 0, 0, 1, 2) and tree.token_ids == [9, 5, 6, 7, 9]


def test_a_file_holds_what_was_written_and_others_are_refused(tmp_path):
    path, trees = tmp_path / "trees.json", best_trees(GOLDEN, 5, 3)
    write_trees(path, trees, {"acceptance": GOLDEN})
    assert read_trees(path) == trees and json.loads(path.read_text())["acceptance"] == list(GOLDEN)
    for wrong in ([[-1, 1]], [[0, 0]], [[-1, 0, 2, 1]], [[-1, 0, 1, 0]]):
        write_trees(path, wrong, {})
        with pytest.raises(ValueError, match="gives no parents of a tree in level order"):
            read_trees(path)
    start = '{"format": "specdec trees 1", "trees": '
    others = ("{}", "[]", "no JSON", '{"format": "specdec trees 2", "trees": [[-1, 0]]}')
    for text in (*others, *(f"{start}{trees}}}" for trees in ("[[]]", "[[-1]]", "[[-1, 0.5]]", "[]", "3"))):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no file of trees; make one with job=tree"):
            read_trees(path)
