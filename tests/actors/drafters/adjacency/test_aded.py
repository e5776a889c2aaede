"""ADED: the published update of the table, bounds of its size, and the two ways to find a tree in it."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from actors.drafters.adjacency import tree_search
from actors.drafters.adjacency.aded import AdedDrafter
from actors.drafters.adjacency.config import AdedDrafterConfig, TreeConstruction
from actors.drafters.adjacency.tree_search import search_tree
from actors.drafters.adjacency.trigrams import HEAVIEST, NUDGE, TrigramTable
from actors.drafters.interface import Context
from actors.protocol.messages import Commit, SamplingParams, TopTokens


def top_tokens(rows):
    """Rows as (token before, token, {next token: probability})."""
    contexts = np.array([row[:2] for row in rows], np.int32)
    token_ids = np.array([list(row[2]) for row in rows], np.int32)
    probs = np.array([list(row[2].values()) for row in rows], np.float32)
    return TopTokens(token_ids.shape[1], contexts.tobytes(), token_ids.tobytes(), probs.tobytes(), ((1, 2, len(rows)),))


def draft(drafter, token_ids, budget=12):
    (proposed,) = drafter.propose([Context(1, 0, list(token_ids), 1, SamplingParams())], [budget])
    proposed.tree.check()
    return proposed.tree


def paths(tree):
    return {tuple(tree.token_ids[i] for i in tree.path_to(node)) for node in range(1, len(tree.token_ids))}


@pytest.fixture(scope="module")
def markov():
    """A source of order 2 over six tokens, a text of it, and what follows each pair with which probability."""
    choose = random.Random(1)
    laws = {(a, b): [choose.random() ** 4 for _ in range(6)] for a in range(6) for b in range(6)}
    text = [0, 1]
    for _ in range(20_000):
        text += choose.choices(range(6), laws[text[-2], text[-1]])
    return text, {pair: [share / sum(law) for share in law] for pair, law in laws.items()}


def mode_path(laws, pair, length):
    path = []
    for _ in range(length):
        token = max(range(6), key=laws[pair].__getitem__)
        path.append(token)
        pair = (pair[1], token)
    return tuple(path)


@pytest.mark.parametrize("construction", TreeConstruction)
def test_a_known_source_is_drafted_along_its_likeliest_path(markov, construction):
    text, laws = markov
    drafter = AdedDrafter(AdedDrafterConfig(construction=construction, learns=False), [text])
    for pair in [(0, 1), (2, 3), (5, 5)]:
        assert mode_path(laws, pair, 3) in paths(draft(drafter, pair, 48))


def test_best_first_takes_the_likeliest_paths(markov):
    text, laws = markov
    drafter = AdedDrafter(AdedDrafterConfig(), [text])
    chances = {}
    for first in range(6):
        for second in range(6):
            chance = laws[3, 4][first]
            chances[first,] = chance
            chances[first, second] = chance * laws[4, first][second]
    found = paths(draft(drafter, (3, 4), 6))
    short = {path for path in found if len(path) <= 2}
    least = min(chances[path] for path in short)
    assert all(chances[path] < 1.2 * least for path in chances.keys() - short), "up to the noise of the text's counts"


def test_the_reward_is_of_the_token_that_follows(markov, monkeypatch):
    """The released code asks for the weight of a pair's own last token, so that most rewards are 1 whatever follows."""
    table = TrigramTable(1000, 12)
    table.count([[1, 2, 3, 4, 5] * 9])
    states = [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert tree_search.reward(table, states) == 4.0
    assert 1.0 + sum(table.weight(pair, after[0]) for pair, after in pairwise(states)) == 1.0


def test_weights_are_nudged_as_published():
    drafter = AdedDrafter(AdedDrafterConfig(learns=False), [[1, 2, 8] * 9])
    context = Context(1, 0, [1, 2], 2, SamplingParams())
    for _ in range(100):
        drafter.observe(context, Commit(1, 0, 2, (), (3,)))
    assert drafter.tables.of(0).weight((1, 2), 3) == HEAVIEST
    assert drafter.tables.of(0).followers((1, 2))[0] == (3, HEAVIEST / (HEAVIEST + 1.0))
    drafter.observe(context, Commit(1, 0, 2, (), (4,)))
    assert drafter.tables.of(0).weight((1, 2), 4) == NUDGE


def test_only_the_latest_tokens_are_nudged():
    drafter = AdedDrafter(AdedDrafterConfig())
    drafter.observe(Context(1, 0, list(range(40)), 2, SamplingParams()), Commit(1, 0, 40, (), (40,)))
    table = drafter.tables.of(0)
    assert len(table) == 14 and table.weight((38, 39), 40) == table.weight((25, 26), 27) == NUDGE


def test_the_targets_distribution_meets_what_was_known_half_way():
    drafter = AdedDrafter(AdedDrafterConfig(width=2))
    drafter.read_top_tokens(top_tokens([(1, 2, {3: 0.5, 4: 0.25}), (-1, 2, {9: 0.9, 8: 0.1})]))
    assert drafter.tables.of(0).followers((1, 2)) == [(3, 0.5), (4, 0.25)] and len(drafter.tables.of(0)) == 1
    drafter.read_top_tokens(top_tokens([(1, 2, {4: 0.75, 5: 0.25})]))
    assert drafter.tables.of(0).followers((1, 2)) == [(4, 0.5), (5, 0.25)]
    assert draft(drafter, (1, 2)).token_ids == (2, 4, 5)


def test_memory_is_bounded():
    table, choose = TrigramTable(50, 3), random.Random(0)
    for _ in range(300):
        table.nudge([choose.randrange(30) for _ in range(16)])
        table.learn(top_tokens([(1, 2, {choose.randrange(9): 0.1})]))
    assert len(table) == 50
    assert all(len(weights) <= 6 for weights in table._weights.values()) and table.weight((1, 2), 0) <= 0.1


@pytest.mark.parametrize("budget", [1, 5, 64])
def test_a_search_keeps_its_budget_and_repeats(markov, budget):
    table = TrigramTable(1000, 12)
    table.count([markov[0]])
    tree = search_tree(table, (0, 1), budget, 150, seed=4)
    tree.check()
    assert tree.num_draft_tokens == min(budget, tree.num_draft_tokens) and tree == search_tree(
        table, (0, 1), budget, 150, 4
    )
    assert len(paths(tree)) == tree.num_draft_tokens and max(tree.depths()) <= 4
    assert search_tree(table, (9, 9), budget, 150, 0).num_draft_tokens == 0
