"""Shapes of draft trees: fixed ones in drawing order, and the likeliest connected one."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from actors.drafters.model.confidence_growth import ConfidenceGrowth
from actors.drafters.model.merging import leaders
from actors.drafters.model.tree_growth import BeamGrowth, BestFirstGrowth, Candidate, GrowingTree, StaticGrowth


def grow(growth, budget, offer):
    """Grow to the end; `offer(node, width)` gives (token, log_prob) of a node's children."""
    tree, frontier = GrowingTree(9), [0]
    for level in range(growth.depth):
        candidates = [Candidate(node, *child) for node in frontier for child in offer(node, growth.width(level))]
        frontier = growth.extend(tree, candidates, budget)
    return growth.finish(tree, budget), tree


def numbered(node, width):
    return [(10 * node + i, -1.0) for i in range(width)]


def test_a_chain_is_one_branch_as_deep_as_the_budget():
    for budget in (1, 2, 4):
        (tree, kept), _ = grow(StaticGrowth([1] * 4), budget, numbered)
        assert tree.is_chain and tree.num_draft_tokens == budget and kept == list(range(budget + 1))


def test_branches_start_at_the_root_in_drawing_order():
    (tree, _), _ = grow(StaticGrowth([3, 1]), 6, numbered)
    assert tree.token_ids == (9, 0, 1, 2, 10, 20, 30) and tree.parents == (-1, 0, 0, 0, 1, 2, 3)


def test_every_level_has_a_branching_of_its_own():
    growth = StaticGrowth([3, 2, 1])
    (tree, _), _ = grow(growth, 15, numbered)
    assert tree.parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9)
    assert [growth.max_fed(budget) for budget in (1, 2, 3, 15)] == [0, 2, 3, 9], "all levels but the last"


def test_a_beam_is_the_best_of_a_level_with_siblings_in_order():
    """Ranked by score over all parents; what is left out counts as no sibling."""
    growth, tree = BeamGrowth(3, 2), GrowingTree(9)
    candidates = [Candidate(0, 1, -1.0, -0.5), Candidate(0, 2, -1.0, 0.0), Candidate(0, 3, -1.0, -0.2)]
    assert growth.extend(tree, candidates, 5) == [1, 2] and tree.token_ids == [9, 2, 3]
    below = [Candidate(1, 4, -1, -0.3), Candidate(1, 5, -1, -0.1), Candidate(2, 6, -1, -0.2), Candidate(2, 7, -1, -9)]
    assert growth.extend(tree, below, 5) == [3, 4] and tree.token_ids[3:] == [5, 6]
    assert growth.extend(tree, [Candidate(3, 8, -1, -0.1), Candidate(4, 9, -1, -0.2)], 5) == []
    assert tree.parents == [-1, 0, 0, 1, 2, 3] and growth.finish(tree, 5)[1] == list(range(6))


def test_growth_ends_with_a_level_that_adds_too_little():
    """OPT-Tree: 0.9 + 0.09 + 0.009 + ... accepted tokens expected; a level adds a tenth of the one before."""
    sizes = []
    for min_gain in (0.0, 0.005, 0.05, 0.5, 5.0):
        offer = lambda node, width: [(7, math.log(0.9 if node == 0 else 0.1))]  # noqa: E731
        (tree, _), _ = grow(BestFirstGrowth(6, 1, min_gain), 6, offer)
        sizes.append(tree.num_draft_tokens)
    assert sizes == [6, 4, 3, 2, 1], "the level that added too little is kept, as it is there"


@pytest.mark.parametrize(
    ("confidence", "width"), [(0.1, 7), (0.3, 7), (0.31, 5), (0.6, 5), (0.7, 3), (0.8, 3), (0.81, 1), (1.0, 1)]
)
def test_a_less_sure_model_offers_more_siblings(confidence, width):
    growth, tree = ConfidenceGrowth(3), GrowingTree(9)
    offered = [Candidate(0, i, math.log(confidence) - i) for i in range(growth.width(0))]
    assert growth.extend(tree, offered, 30) == [1] and tree.parents == [-1, *[0] * width]


def test_siblings_leave_room_for_the_chain():
    (tree, _), _ = grow(ConfidenceGrowth(4), 9, lambda node, width: [(i, -2.0 - i) for i in range(width)])
    assert tree.parents == (-1, 0, 0, 0, 0, 0, 0, 1, 7, 8), "six of seven siblings, then three more levels"
    (tree, _), _ = grow(ConfidenceGrowth(4), 2, lambda node, width: [(i, -2.0 - i) for i in range(width)])
    assert tree.parents == (-1, 0, 1)


def test_paths_with_the_same_last_tokens_have_one_leader():
    tree = GrowingTree(9)
    for parent, token in ((0, 1), (0, 2), (0, 3), (1, 5), (2, 5), (3, 5), (1, 6), (4, 8), (5, 8), (6, 8)):
        tree.add(Candidate(parent, token, 0.0))
    assert leaders(tree, [4, 5, 6, 7], 0) == {4: 4, 5: 5, 6: 6, 7: 7}
    assert leaders(tree, [4, 5, 6, 7], 1) == {4: 4, 5: 4, 6: 4, 7: 7}
    assert leaders(tree, [5, 6], 2) == {5: 5, 6: 6}, "two tokens back they differ"
    assert leaders(tree, [8, 9, 10], 2) == {8: 8, 9: 8, 10: 8} and leaders(tree, [9, 10], 3) == {9: 9, 10: 10}


@pytest.mark.parametrize("budget", range(1, 7))
def test_a_fixed_shape_is_cut_from_behind_and_nothing_is_chosen_by_its_value(budget):
    """What ratio tests rely on: which draws are kept may not depend on what was drawn."""
    choose = random.Random(budget)
    full, _ = grow(StaticGrowth([3, 1]), 6, numbered)[0]
    (tree, _), _ = grow(StaticGrowth([3, 1]), budget, lambda n, w: [(10 * n + i, -choose.random()) for i in range(w)])
    assert tree.token_ids == full.token_ids[: budget + 1] and tree.parents == full.parents[: budget + 1]


@pytest.mark.parametrize("seed", range(20))
def test_the_likeliest_nodes_are_kept_and_hang_together(seed):
    choose = random.Random(seed)
    budget, depth, width = choose.randint(1, 8), choose.randint(1, 4), choose.randint(1, 3)
    growth = BestFirstGrowth(depth, width)
    (tree, kept), grown = grow(growth, budget, lambda n, w: [(choose.randrange(9), -choose.random()) for _ in range(w)])
    tree.check()
    assert tree.num_draft_tokens == min(budget, len(grown.token_ids) - 1) and kept[0] == 0
    assert [grown.token_ids[node] for node in kept] == list(tree.token_ids)
    dropped = set(range(len(grown.token_ids))) - set(kept)
    assert not dropped or max(grown.values[node] for node in dropped) <= min(grown.values[node] for node in kept)
    for node, parent in zip(kept[1:], tree.parents[1:], strict=True):
        assert kept[parent] == grown.parents[node]


def test_a_node_is_worth_its_whole_path():
    """A likely child of an unlikely node loses to an unlikely child of a likely one."""
    log_probs = {
        0: [math.log(0.6), math.log(0.2)],
        1: [math.log(0.5), math.log(0.35)],
        2: [math.log(0.9), math.log(0.1)],
    }
    names = itertools.count(10)
    (tree, kept), _ = grow(BestFirstGrowth(2, 2), 4, lambda node, width: [(next(names), p) for p in log_probs[node]])
    assert tree.token_ids == (9, 10, 11, 12, 13) and tree.parents == (-1, 0, 0, 1, 1)
    assert kept == [0, 1, 2, 3, 4]


def test_equal_values_are_taken_in_the_order_they_came():
    (tree, _), _ = grow(BestFirstGrowth(2, 2), 3, lambda node, width: [(10 * node + i, 0.0) for i in range(width)])
    assert tree.token_ids == (9, 0, 1, 10)


def test_only_the_likeliest_of_a_level_are_fed_on():
    tree, growth = GrowingTree(9), BestFirstGrowth(3, 2)
    first = growth.extend(tree, [Candidate(0, 1, -3.0), Candidate(0, 2, -1.0), Candidate(0, 3, -2.0)], 9)
    assert [tree.token_ids[node] for node in first] == [2, 3]
