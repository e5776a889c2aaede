"""Which hypotheses a policy feeds next: on hand-made trees, whose probabilities can be multiplied in one's head."""

from __future__ import annotations

from math import log

import pytest

from actors.drafters.draft_ahead.tree import enumerate_outcomes, redraft
from actors.protocol.draft_tree import DraftTree


def fed_chain(probs, length, fed):
    """A root and a chain of `length` first choices, of which the first `fed` were fed; every fed node has children."""
    tree, node = DraftTree(0), 0
    for step in range(length):
        tree.expand(node, [10 * step + i for i in range(len(probs))], [log(p) for p in probs])
        node = tree.nodes[node].children[0]
        if step < fed:
            tree.nodes[node].row = step
    return tree


def tokens(tree, nodes):
    return [tree.nodes[node].token for node in nodes]


def test_outcomes_share_the_pass_of_the_proposals_end():
    tree = fed_chain((0.8, 0.1, 0.05), length=3, fed=2)
    tree.offer(tree.best_chain(3))
    # The end of the proposal first, then the likeliest ways in which it may be left: 0.1, 0.08, 0.064, 0.05.
    assert tokens(tree, enumerate_outcomes(tree, width=5, length=2)) == [20, 1, 11, 21, 2]
    assert tokens(tree, enumerate_outcomes(tree, width=1, length=2)) == [20]


def test_an_outcome_is_continued_as_a_chain_and_then_left():
    tree = fed_chain((0.8, 0.1), length=1, fed=1)
    (offered,) = tree.best_chain(1)
    tree.offer([offered])
    tree.expand(offered, [5], [log(0.9)])
    for expected in ([5, 1], [6], [7], []):  # the likelier outcome goes two steps further, the other has no children
        nodes = enumerate_outcomes(tree, width=2, length=3)
        assert tokens(tree, nodes) == expected
        for node in nodes:
            tree.nodes[node].row = len(tree.nodes)
            if tree.nodes[node].token != 1:
                tree.expand(node, [tree.nodes[node].token + 1], [log(0.9)])


def test_a_redraft_ends_when_a_pass_is_not_worth_it():
    def passes(prob, depth):
        tree, count = DraftTree(0), 1
        tree.expand(0, [1], [log(prob)])
        while nodes := redraft(tree, 1, depth):
            (node,) = nodes
            tree.nodes[node].row = count
            tree.expand(node, [1], [log(prob)])
            count += 1
        return count

    assert passes(0.6, depth=8) == 1  # a second token would be there in 0.36 of the cases
    assert passes(0.8, depth=8) == 3  # 0.8 ** 3 = 0.51, 0.8 ** 4 = 0.41
    assert passes(0.99, depth=8) == 8, "and never goes beyond what may be proposed"


def test_a_redrafted_tree_counts_what_all_its_nodes_may_add():
    tree = DraftTree(0)
    tree.expand(0, [1, 2, 3], [log(0.65), log(0.3), log(0.05)])
    assert redraft(tree, 1, depth=3) == [], "alone the likeliest adds 0.42 tokens"
    assert tokens(tree, redraft(tree, 2, depth=3)) == [1, 2], "with the next one 0.51"
    assert redraft(tree, 2, depth=1) == []


def test_further_outcomes_are_prepared_once_the_likeliest_are():
    tree = fed_chain((0.6, 0.3, 0.1), length=1, fed=1)
    (offered,) = tree.best_chain(1)
    tree.offer([offered])
    for expected in ([1], [2], []):
        nodes = enumerate_outcomes(tree, width=1, length=1)
        assert tokens(tree, nodes) == expected
        for node in nodes:
            tree.nodes[node].row = len(tree.nodes)


def bushy():
    tree = DraftTree(7)
    tree.expand(0, [1, 2, 3], [log(0.6), log(0.3), log(0.1)])
    tree.expand(2, [4, 5, 6], [log(0.7), log(0.2), log(0.1)])
    tree.expand(1, [8, 9], [log(0.5), log(0.4)])
    return tree


def test_what_is_written_down_is_read_off_like_the_original():
    """Every proposal after an outcome can be read off the written tree."""
    tree = bushy()
    for num_leaves in (1, 3):
        copy = DraftTree.read(*tree.written(num_leaves))
        for outcome in ([1], [2]):
            ours, theirs = (one.reroot(one.find(outcome))[0] for one in (tree, copy))
            assert ours.proposal(ours.best_chain(4)) == theirs.proposal(theirs.best_chain(4))
            if num_leaves == 3:
                assert ours.proposal(ours.best_nodes(2)) == theirs.proposal(theirs.best_nodes(2))
        assert (copy.find([3]) is None) == (num_leaves == 1), "an outcome after which nothing is prepared"


def test_what_was_taken_is_found_again():
    tree = bushy()
    taken = tree.proposal(tree.best_nodes(4))
    assert tokens(tree, tree.places(taken)) == list(taken.token_ids[1:])
    tree.nodes[0].children.remove(1)
    assert tokens(tree, tree.places(taken)) == [token for token in taken.token_ids[1:] if token in (2, 4)]


def test_a_pass_is_worth_the_tokens_it_may_add():
    tree = bushy()
    assert tree.worth([1, 2]) == pytest.approx(0.9)
    assert tree.worth([tree.nodes[2].children[0]]) == pytest.approx(0.3 * 0.7)
    assert tree.worth([]) == 0
