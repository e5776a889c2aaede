"""What draft-ahead feeds next in random trees, against the definition of each policy over all nodes."""

from __future__ import annotations

import itertools
import math

import pytest

from actors.drafters.draft_ahead.tree import AHEAD, num_chained, redraft
from tests.actors.protocol.test_draft_tree import SEEDS, Grown

LENGTH = 2


def prepared(seed):
    """A random tree and a proposal from it, a chain or any connected set; fed nodes are connected, and nodes of the
    proposal that have children were fed."""
    grown = Grown(seed)
    tree, rng = grown.tree, grown.rng
    tree.clear_rows()
    tree.offer(tree.best_chain(rng.randrange(4)) if rng.random() < 0.5 else grown.connected())
    fed = {*grown.connected(), *(i for i, node in enumerate(tree.nodes) if i and node.offered and node.children)}
    for row, node in enumerate(sorted(fed)):
        tree.nodes[node].row = row
    return tree


def can_be_fed(tree):
    nodes = tree.nodes
    return [
        i for i in range(1, len(nodes)) if nodes[i].row < 0 and (not nodes[i].parent or nodes[nodes[i].parent].row >= 0)
    ]


def likeliest(tree, nodes, count):
    return sorted(nodes, key=lambda i: -tree.nodes[i].value)[:count]


@pytest.mark.extended
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_nodes_fed_next_are_those_of_the_definition(seed, width):
    tree = prepared(seed)
    nodes, ready = tree.nodes, can_be_fed(tree)
    grown = AHEAD["tree"](tree, width, LENGTH)
    assert grown == likeliest(tree, ready, width)

    unfed = [i for i in ready if nodes[i].offered][:width]
    deepest = max(node.depth for node in nodes if node.offered)
    chain = tree.best_chain(len(nodes))
    ahead = unfed or [i for i in chain if i in ready and nodes[i].depth <= deepest + LENGTH + 1][:1]
    if not unfed and len(chain) > deepest + LENGTH:  # the chain is long enough: its last node has been drawn
        ahead = []
    assert AHEAD["pearl"](tree, width, LENGTH) == ahead

    branches = AHEAD["branches"](tree, width, LENGTH)
    assert branches[: len(unfed)] == unfed and set(branches) <= set(ready) and len(branches) <= width
    outcome_of = {}
    for tip in branches[len(unfed) :]:
        path = tree_path(tree, tip)
        beyond = [i for i in path if not nodes[i].offered]
        assert len(beyond) <= LENGTH and all(nodes[a].children[0] == b for a, b in itertools.pairwise(beyond))
        outcome_of[tip] = beyond[0]
    steps = [nodes[tip].depth - nodes[outcome].depth for tip, outcome in outcome_of.items()]
    assert steps == sorted(steps), "the shorter outcomes first"
    assert len(set(outcome_of.values())) == len(outcome_of)
    outcomes = [i for i in range(1, len(nodes)) if not nodes[i].offered and nodes[nodes[i].parent].offered]
    open_ = [i for i in outcomes if any(tip in ready for tip in continuation(tree, i))]
    assert set(outcome_of.values()) == set(likeliest(tree, open_, width - len(unfed)))


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", AHEAD)
@pytest.mark.parametrize("seed", SEEDS)
def test_chains_go_on_at_once_as_they_would_pass_by_pass(seed, pipeline):
    """Children that are less likely than their parents and likelier than nothing: what a drafter would find."""
    length, width = 3, 2
    tree = prepared(seed)
    chosen = AHEAD[pipeline](tree, width, length)
    if not chosen:
        return
    num_passes = num_chained(pipeline, tree, chosen, length)
    assert num_passes == 1 or pipeline != "tree"
    for step in range(1, num_passes + 1):
        for node in chosen:
            tree.nodes[node].row = len(tree.nodes)
            tree.expand(node, [50 + step, 60], [-1e-3, -9.0])
        expected = [tree.nodes[node].children[0] for node in chosen]
        chosen = AHEAD[pipeline](tree, width, length)
        if step < num_passes:
            assert sorted(chosen) == sorted(expected)
    assert pipeline != "pearl" or num_passes == 1 or not chosen, "the whole chain at once"


def tree_path(tree, node):
    path = []
    while node:
        path.append(node)
        node = tree.nodes[node].parent
    return path[::-1]


def continuation(tree, node):
    """The outcome and the chain of first children below it, `LENGTH` nodes at most."""
    chain = [node]
    while len(chain) < LENGTH and tree.nodes[chain[-1]].row >= 0 and tree.nodes[chain[-1]].children:
        chain.append(tree.nodes[chain[-1]].children[0])
    return chain[-1:]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_redraft_feeds_what_may_still_be_proposed_if_it_adds_enough(seed):
    tree = prepared(seed)
    for width, depth in ((1, 2), (2, 2), (3, 3)):
        if width == 1:
            found = [i for i in tree.best_chain(depth - 1) if tree.nodes[i].row < 0][:1]
        else:
            found = [i for i in likeliest(tree, can_be_fed(tree), width) if tree.nodes[i].depth < depth]
        gain = sum(math.exp(tree.nodes[i].value) ** (1 + 1 / tree.nodes[i].depth) for i in found)
        assert redraft(tree, width, depth) == (found if gain > 0.5 else [])
