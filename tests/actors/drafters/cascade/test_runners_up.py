"""Siblings of a level's tokens: each those of its own node, and leaves beside that token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actors.drafters.cascade.runners_up import best_runners_up, drawn_runners_up, num_own, with_siblings
from actors.protocol.messages import Proposal, SamplingParams, SparseDistribution, TokenTree
from actors.verification.random_source import HashRandomSource
from actors.verification.verifier import VerifyInput, VerifyResult

TREE = TokenTree((4, 1, 2, 3, 0), (-1, 0, 0, 2, 2))
"""The children 1 and 2 of the root; 3 and 0 after 2."""
PATH = (2, 3)
VOCAB = 6


@pytest.fixture
def verified():
    return VerifyInput(0, [5, 4], 1, SamplingParams(temperature=0.0), 1, Proposal(0, 0, 2, 0, TREE))


def test_the_next_best_come_from_the_logits_of_the_token_s_own_node(verified):
    """The path leaves out nodes 1 and 4; every node has another order of tokens."""
    orders = [torch.randperm(VOCAB, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    own = (TREE.token_ids[2], TREE.token_ids[3], 5)
    logits = torch.zeros(5, VOCAB)
    for node, order in enumerate(orders):
        logits[node, order] = torch.arange(VOCAB, 0, -1, dtype=torch.float32)
    for node, token in zip((0, *PATH), own, strict=True):
        logits[node, token] = 99.0  # it came out there
    found = best_runners_up(logits, verified, VerifyResult(PATH, own[-1]), (), width=3)
    assert found == [
        tuple([token for token in orders[node].tolist() if token != mine][:2])
        for node, mine in zip((0, *PATH), own, strict=True)
    ]


@pytest.mark.parametrize("independent", [False, True])
def test_drawn_ones_come_from_the_distribution_of_the_token_s_own_node(verified, independent):
    """Distributions of different nodes share no token."""
    tokens = ((2, 6, 7), (3, 8, 9), (5, 10, 11))
    laws = tuple(SparseDistribution(of_node, (0.2, 0.4, 0.4)) for of_node in tokens)
    result = VerifyResult(PATH, 5, laws)
    found = drawn_runners_up(verified, result, HashRandomSource(3, 2), 3, independent=independent)
    for siblings, of_node in zip(found, tokens, strict=True):
        assert len(siblings) == 2 and set(siblings) <= set(of_node)
        assert independent or set(siblings) == set(of_node[1:])


@pytest.mark.parametrize("independent", [False, True])
def test_every_sibling_is_drawn_with_a_number_of_its_own(verified, independent):
    """Numbers behind those of the tree's nodes, which the rule used; weights are the law's, less what was taken."""
    laws = tuple(SparseDistribution(of_node, (0.5, 0.25, 0.25)) for of_node in ((2, 6, 7), (3, 8, 9), (5, 10, 11)))
    asked = []

    class Last:
        """Takes the last token that is possible."""

        def sample(self, weights, node):
            asked.append((node, weights.tolist()))
            return int(weights.nonzero()[0][-1])

    source: Any = Last()
    found = drawn_runners_up(verified, VerifyResult(PATH, 5, laws), source, 3, independent=independent)
    assert [node for node, _ in asked] == list(range(5, 11))
    first, second = [weights for _, weights in asked][:2]
    if independent:
        assert first == second == [0.5, 0.25, 0.25] and found == [(7, 7), (9, 9), (11, 11)]
    else:
        assert (first, second) == ([0.0, 0.25, 0.25], [0.0, 0.25, 0.0]) and found == [(7, 6), (9, 8), (11, 10)]
        few = drawn_runners_up(verified, VerifyResult(PATH, 5, laws), source, 9, independent=False)
        assert few == found, "a law of three tokens has two more"


@pytest.mark.parametrize(
    ("num_nodes", "width", "own"), [(1, 1, 1), (5, 1, 5), (5, 2, 3), (6, 2, 3), (7, 3, 3), (1, 4, 1)]
)
def test_a_path_is_as_long_as_its_nodes_with_siblings_need(num_nodes, width, own):
    assert num_own(num_nodes, width) == own


def test_siblings_hang_on_the_parent_of_their_token():
    token_ids, parents = [9, 1, 2, 3], [-1, 0, 1, 2]
    assert with_siblings(token_ids, parents, 3, [(11, 12), (21,), (31, 32), (41,)], room=4) == 4
    assert token_ids[4:] == [11, 12, 21, 31] and parents[4:] == [0, 0, 1, 2]
    assert np.all(np.array(parents)[1:4] == [0, 1, 2])
