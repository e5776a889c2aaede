"""Which hypotheses a policy feeds next: on hand-made trees, whose probabilities can be multiplied in one's head."""

from __future__ import annotations

from math import log

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
