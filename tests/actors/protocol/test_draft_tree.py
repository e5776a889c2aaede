"""The draft tree against a shadow of it: a dictionary from the path of a node to its log-probability."""

from __future__ import annotations

import math
import random

import pytest

from actors.protocol.draft_tree import DraftTree
from actors.protocol.messages import TokenTree

SEEDS = range(40)


class Grown:
    """A random tree, fed and expanded in random order, and its shadow."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.tree = DraftTree(rng.randrange(9))
        self.values: dict[tuple[int, ...], float] = {(): 0.0}
        self.children: dict[tuple[int, ...], list[int]] = {(): []}
        self.expanded: set[tuple[int, ...]] = set()
        for _ in range(rng.randrange(1, 12)):
            self.expand(rng.choice(list(self.values)))
        for i, path in enumerate(rng.sample(list(self.values), rng.randrange(len(self.values)))):
            if path:
                self.node(path).row = i

    def node(self, path):
        return self.tree.nodes[self.tree.find(path)]

    def expand(self, path):
        token_ids = self.rng.sample(range(6), 3)
        log_probs = sorted((math.log(self.rng.uniform(0.05, 0.6)) for _ in token_ids), reverse=True)
        log_probs[-1] = self.rng.choice([log_probs[-1], -math.inf])
        self.tree.expand(self.tree.find(path), token_ids, log_probs)
        self.expanded.add(path)
        known = self.children[path]
        likely = [token for token, log_prob in zip(token_ids, log_probs, strict=True) if log_prob > -math.inf]
        for token, log_prob in zip(likely, log_probs, strict=False):
            child = (*path, token)
            change = self.values[path] + log_prob - self.values.get(child, 0.0)
            self.children.setdefault(child, [])
            self.values[child] = self.values.get(child, 0.0)
            for other in self.values:
                if other[: len(child)] == child:
                    self.values[other] += change
        self.children[path] = likely + [token for token in known if token not in likely]

    def connected(self):
        """A random connected set of nodes below the root."""
        chosen: list[tuple[int, ...]] = []
        for path in sorted(self.values, key=len):
            if path and (path[:-1] in [*chosen, ()]) and self.rng.random() < 0.6:
                chosen.append(path)
        return sorted(self.tree.find(path) for path in chosen)


def paths_of(tree):
    """Path of tokens of every node."""
    paths = [()]
    for node in tree.nodes[1:]:
        paths.append((*paths[node.parent], node.token))
    return paths


def assert_is(tree, values, children, expanded):
    paths = paths_of(tree)
    assert sorted(paths) == sorted(values)
    for i, (node, path) in enumerate(zip(tree.nodes, paths, strict=True)):
        assert tree.find(path) == i and node.depth == len(path) and node.expanded == (path in expanded)
        assert node.value == pytest.approx(values[path])
        assert [tree.nodes[child].token for child in node.children] == children[path]


@pytest.mark.parametrize("seed", SEEDS)
def test_values_places_and_order_are_those_of_the_paths(seed):
    grown = Grown(seed)
    tree = grown.tree
    assert_is(tree, grown.values, grown.children, grown.expanded)
    assert tree.find([7]) is None and tree.child(0, 7) is None
    ranked = sorted(grown.values.values(), reverse=True)
    best = tree.best_nodes(4)
    assert sorted((tree.nodes[node].value for node in best), reverse=True) == pytest.approx(ranked[1:5])
    assert 0 not in best and all(tree.nodes[node].parent in [0, *best] for node in best) and best == sorted(best)
    assert tree.worth(best) == pytest.approx(sum(map(math.exp, ranked[1:5])))
    chain = tree.best_chain(3)
    assert len(chain) <= 3 and all(tree.nodes[a].children[0] == b for a, b in zip([0, *chain], chain, strict=False))
    assert len(chain) == 3 or not tree.nodes[[0, *chain][-1]].children


def test_the_best_nodes_hang_together_where_values_rise_along_a_path():
    """As a preview of another process may have them."""
    tree = DraftTree.read(TokenTree((0, 1, 2, 3), (-1, 0, 1, 0)), (0.0, -2.0, -1.0, -3.0))
    assert [tree.best_nodes(count) for count in range(5)] == [[], [1], [1, 2], [1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_proposal_is_found_again_and_its_outcomes_are_known(seed):
    grown = Grown(seed)
    tree = grown.tree
    tree.offer(tree.best_chain(2))
    nodes = grown.connected()
    tree.offer(nodes)
    proposal, paths = tree.proposal(nodes), paths_of(tree)
    proposal.check()
    assert proposal.token_ids[0] == tree.root.token and tree.places(proposal) == nodes
    assert sorted(paths_of(DraftTree.read(proposal, ()))) == sorted(paths[node] for node in [0, *nodes])
    offered = {paths[node] for node in [0, *nodes]}
    assert {path for node, path in zip(tree.nodes, paths, strict=True) if node.offered} == offered
    left = [value for path, value in grown.values.items() if path and path[:-1] in offered and path not in offered]
    assert tree.outcomes() == pytest.approx(sorted(map(math.exp, left), reverse=True))
    other = TokenTree((0, 8, 8, *grown.children[()][:1]), (-1, 0, 1, *[0] * len(grown.children[()][:1])))
    assert tree.places(other) == tree.nodes[0].children[:1], "paths that the tree does not have are left out"
    fed = [path for path in grown.expanded if path and path not in offered]
    fed.sort(key=lambda path: (-grown.values[path], tree.find(path)))
    for width in (1, len(nodes) + 2):
        expected = [*nodes, *(tree.find(path) for path in fed[: max(0, width - len(nodes))])]
        assert tree.nodes_to_refresh(width) == sorted(expected)
    tree.clear_rows()
    assert all(node.row == -1 for node in tree.nodes)


@pytest.mark.parametrize("seed", SEEDS)
def test_below_a_new_root_all_is_as_before(seed):
    grown = Grown(seed)
    tree = grown.tree
    root = grown.rng.choice(list(grown.values))
    below, rows = tree.reroot(tree.find(root))

    def cut(paths):
        return [path for path in paths if path[: len(root)] == root]

    assert below.root.token == grown.node(root).token and below.root.row == -1
    assert_is(
        below,
        {path[len(root) :]: grown.values[path] - grown.values[root] for path in cut(grown.values)},
        {path[len(root) :]: grown.children[path] for path in cut(grown.values)},
        {path[len(root) :] for path in cut(grown.expanded)},
    )
    for node, path in zip(below.nodes[1:], paths_of(below)[1:], strict=True):
        old_row = grown.node((*root, *path)).row
        assert (rows[node.row] if node.row >= 0 else -1) == old_row
    assert sorted(node.row for node in below.nodes if node.row >= 0) == list(range(len(rows)))


@pytest.mark.parametrize("num_leaves", [1, 2, 9])
@pytest.mark.parametrize("seed", SEEDS[:15])
def test_a_written_tree_has_every_inner_node_and_the_likeliest_leaves(seed, num_leaves):
    grown = Grown(seed)
    written, values = grown.tree.written(num_leaves)
    written.check()
    copy = DraftTree.read(written, values)
    expected = {
        path
        for path in grown.values
        if not path or grown.children[path] or grown.children[path[:-1]].index(path[-1]) < num_leaves
    }
    children = {path: [token for token in grown.children[path] if (*path, token) in expected] for path in expected}
    assert copy.root.token == grown.tree.root.token
    assert_is(copy, {path: grown.values[path] for path in expected}, children, set())
