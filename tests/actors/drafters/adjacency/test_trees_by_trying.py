"""The trees of recycling, ADED and its search against trees found by trying everything, and the table against lists."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from actors.drafters.adjacency.aded import AdedDrafter
from actors.drafters.adjacency.config import AdedDrafterConfig
from actors.drafters.adjacency.recycling import RANK_SHARES, tree_template
from actors.drafters.adjacency.tree_search import search_tree
from actors.drafters.adjacency.trigrams import HEAVIEST, NUDGE, TrigramTable
from actors.drafters.interface import Context
from actors.protocol.messages import SamplingParams, TokenTree, TopTokens


@pytest.mark.parametrize(("width", "size"), [(1, 4), (2, 9), (3, 20), (8, 24), (12, 40)])
def test_a_template_has_the_paths_with_the_highest_product_of_shares(width, size):
    shares = [*RANK_SHARES, *(RANK_SHARES[-1] * 0.8**i for i in range(1, 64))][:width]
    depth = size if width == 1 else 6
    paths = [
        path
        for length in range(1, depth + 1)
        for path in itertools.product(range(min(width, 8 if length <= 4 else 3)), repeat=length)
    ]
    paths += [(*front, rank) for front in ((), (0,)) for rank in range(8, width)]
    values = sorted((math.prod(shares[rank] for rank in path) for path in paths), reverse=True)[:size]
    template = tree_template(size, width)
    found: list[tuple[int, ...]] = [()]
    for parent, rank in zip(template.parents[1:], template.ranks[1:], strict=True):
        found.append((*found[parent], int(rank)))
    own = sorted((math.prod(shares[rank] for rank in path) for path in found[1:]), reverse=True)
    np.testing.assert_allclose(own, values, rtol=1e-9)
    assert template.parent_tuple == tuple(template.parents.tolist()) and template.parents[0] == -1
    nodes = [node for depth in template.depths for node in range(depth.start, depth.stop)]
    assert nodes == list(range(1, size + 1)), "the slices hold every node once"
    assert all(len({len(found[node]) for node in range(one.start, one.stop)}) == 1 for one in template.depths)


def rows(pairs):
    """Rows as ((token before, token), {next token: probability})."""
    contexts = np.array([pair for pair, _ in pairs], np.int32)
    token_ids = np.array([list(law) for _, law in pairs], np.int32)
    probs = np.array([list(law.values()) for _, law in pairs], np.float32)
    spans = ((1, 2, len(pairs)),)
    return TopTokens(token_ids.shape[1], contexts.tobytes(), token_ids.tobytes(), probs.tobytes(), spans)


class Listed:
    """The table on plain lists: pairs in the order of their last change, weights as they were entered."""

    def __init__(self, capacity, width):
        self._capacity, self._width, self.entries = capacity, width, []

    def _take(self, pair):
        known = [weights for one, weights in self.entries if one == pair]
        self.entries = [entry for entry in self.entries if entry[0] != pair]
        if not known and len(self.entries) == self._capacity:
            del self.entries[0]
        self.entries.append((pair, known[0] if known else {}))
        return self.entries[-1][1]

    def nudge(self, text):
        for i in range(len(text) - 2):
            weights = self._take((text[i], text[i + 1]))
            weights[text[i + 2]] = min(HEAVIEST, weights.get(text[i + 2], 0.0) + NUDGE)
            if len(weights) > 2 * self._width:
                heaviest = sorted(weights.items(), key=lambda one: -one[1])[: self._width]
                weights.clear()
                weights.update(heaviest)

    def learn(self, pair, law):
        weights = self._take(pair)
        before = dict(weights)
        weights.clear()
        for token, probability in list(law.items())[: self._width]:
            weights[token] = (before.get(token, probability) + probability) / 2

    def followers(self, pair):
        weights = dict(self.entries).get(pair, {})
        total = max(1.0, sum(weights.values()))
        ranked = sorted(((token, weight / total) for token, weight in weights.items()), key=lambda o: (-o[1], o[0]))
        return ranked[: self._width]


@pytest.mark.parametrize("seed", range(8))
def test_a_table_is_what_was_learnt_last_and_nudged_since(seed):
    choose, width = random.Random(seed), 3
    table, listed = TrigramTable(6, width), Listed(6, width)
    for _ in range(150):
        if choose.random() < 0.5:
            text = [choose.randrange(4) for _ in range(choose.randrange(1, 7))]
            table.nudge(text)
            listed.nudge(text)
        else:
            tokens = choose.sample(range(9), 4)
            law = {token: choose.randrange(1, 64) / 256 for token in tokens}
            pair = (choose.randrange(-1, 4), choose.randrange(4))
            table.learn(rows([(pair, law)]))
            if pair[0] >= 0:
                listed.learn(pair, law)
        for one in range(4):
            assert all(table.followers((one, last)) == listed.followers((one, last)) for last in range(4))
        assert len(table) == len(listed.entries)
    copied, pair = table.copy(), listed.entries[0][0]
    assert all(copied.followers(one) == table.followers(one) for one, _ in listed.entries)
    token, before = table.followers(pair)[0][0], table.followers(pair)
    weight = table.weight(pair, token)
    copied.nudge([*pair, token])
    assert copied.weight(pair, token) == pytest.approx(weight + NUDGE), "a copy changes by itself"
    assert table.weight(pair, token) == weight and table.followers(pair) == before


def test_a_corpus_counts_shares_within_each_text():
    table = TrigramTable(100, 2)
    table.count([[1, 2, 3, 1, 2, 3, 1, 2, 4], [1, 2, 5], [3, 1]])
    assert table.followers((1, 2)) == [(3, 0.5), (4, 0.25)], "two of three followers are kept"
    assert table.followers((2, 3)) == [(1, 1.0)] and table.followers((2, 5)) == []
    assert table.weight((4, 1), 2) == 0.0, "no tri-gram crosses the end of a text"


def paths_of(tree: TokenTree):
    return [tuple(tree.token_ids[i] for i in tree.path_to(node)) for node in range(1, len(tree.token_ids))]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("least", [0.0, 0.05])
def test_best_first_takes_the_likeliest_paths_and_none_below_the_least(seed, least):
    choose = random.Random(seed)
    laws = {}
    for pair in itertools.product(range(3), repeat=2):
        parts = [choose.random() for _ in range(3)]
        laws[pair] = {token: part / sum(parts) for token, part in enumerate(parts)}
    drafter = AdedDrafter(AdedDrafterConfig(min_probability=least, width=3))
    drafter.read_top_tokens(rows(list(laws.items())))
    (draft,) = drafter.propose([Context(1, 0, [9, 0, 1], 3, SamplingParams())], [12])
    chances = {}
    for length in range(1, 7):
        for path in itertools.product(range(3), repeat=length):
            pair, chance = (0, 1), 1.0
            for token in path:
                chance *= laws[pair][token]
                pair = (pair[1], token)
            chances[path] = chance
    found = paths_of(draft.tree)
    wanted = sorted((value for value in chances.values() if value >= least), reverse=True)[:12]
    assert [chances[path] for path in found] == pytest.approx(wanted, rel=1e-5), "the likeliest first"
    assert len(set(found)) == len(found) and draft.tree.token_ids[0] == 1


def test_without_two_tokens_or_a_table_nothing_is_drafted():
    drafter = AdedDrafter(AdedDrafterConfig())
    for text in ([1], [1, 2]):
        (draft,) = drafter.propose([Context(1, 0, text, 1, SamplingParams())], [5])
        assert draft.tree == TokenTree.root(text[-1])


def test_a_search_follows_a_certain_text_to_its_depth():
    """Four pairs of a trajectory and one token more: the path of a text that has no other."""
    table = TrigramTable(100, 3)
    table.count([list(range(12))])
    assert search_tree(table, (2, 3), 20, 30, 0) == TokenTree.chain(3, [4, 5, 6, 7])
    assert search_tree(table, (2, 3), 2, 30, 0) == TokenTree.chain(3, [4, 5])
    assert search_tree(table, (9, 10), 20, 30, 0) == TokenTree.chain(10, [11])


def test_a_search_visits_what_is_rewarded():
    """3 comes after 1 2 nearly always, and 4 leads on to heavier tri-grams only seldom."""
    table = TrigramTable(100, 3)
    table.count([[1, 2, 3] * 30 + [1, 2, 4, 4, 4]])
    tree = search_tree(table, (1, 2), 4, 200, 1)
    assert tree.token_ids[1] == 3 and paths_of(tree)[0] == (3,)
    assert (3, 1) in paths_of(tree)
