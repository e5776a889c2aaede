"""Several rounds with the production draws and coins. Enumeration assumes fresh numbers; this test checks that the keys
really make them fresh. Bottom-up rules are biased by any number that is met twice, so both ways of meeting one (draft
noise or acceptance coins keyed by position) are made on purpose too, and must be found."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from actors.protocol.messages import SamplingKind, SamplingParams, TokenTree
from actors.sampling.draft_sampling import draw_iid, draw_without_replacement
from actors.verification.distributions import DrawnTree
from actors.verification.random_source import HashRandomSource
from actors.verification.rules import RULES
from tests import matrices

LENGTH = 4
NUM_CHAINS, NUM_TREES = (5000, 2500) if matrices.is_whole else (2500, 1200)
IID, WOR = SamplingKind.IID, SamplingKind.WITHOUT_REPLACEMENT
DRAW = {IID: draw_iid, WOR: draw_without_replacement}


class PositionCoins(HashRandomSource):
    """The mistake: a coin is keyed by the position of the token it judges, whatever the round."""

    def __init__(self, seed: int, step: int, depths: list[int]) -> None:
        super().__init__(seed, step)
        object.__setattr__(self, "_by_position", [HashRandomSource(seed, step + depth) for depth in depths])

    def accept(self, probability: float, node: int) -> bool:
        return self._by_position[node].accept(probability, 0)


def grow(roots, seeds, lengths, widths, kind, q_scores, by_position):
    """One tree per sequence, level by level, all sequences in one call of the production draw."""
    token_ids = [[root] for root in roots]
    parents, distributions = [[-1] for _ in roots], [[None] for _ in roots]
    frontier = [(i, 0) for i in range(len(roots))]
    for depth, width in enumerate(widths):
        scores = q_scores[torch.tensor([token_ids[i][node] for i, node in frontier])]
        params = [SamplingParams(temperature=1.0, seed=seeds[i]) for i, _ in frontier]
        steps = [lengths[i] + depth * by_position for i, _ in frontier]
        nodes = [0 if by_position else node for _, node in frontier]
        below = []
        for (i, node), drawn in zip(
            frontier, DRAW[kind](scores, params, steps, nodes, width, scores.shape[-1]), strict=False
        ):
            distributions[i][node] = drawn.distribution
            for token in drawn.token_ids:
                below.append((i, len(token_ids[i])))
                token_ids[i].append(token)
                parents[i].append(node)
                distributions[i].append(None)
        frontier = below
    return [
        (TokenTree(tuple(t), tuple(p)), tuple(distribution))
        for t, p, distribution in zip(token_ids, parents, distributions, strict=False)
    ]


def emitted(rule, kind, widths, p, q, n, reuse=None) -> np.ndarray:
    """First tokens [n, LENGTH] of n sequences that start after token 0; row i of p and q is for the token after i."""
    q_scores = torch.log(torch.tensor(q, dtype=torch.float32))
    sequences = [[0] for _ in range(n)]
    live = list(range(n))
    while live:
        trees = grow(
            [sequences[i][-1] for i in live],
            live,
            [len(sequences[i]) for i in live],
            widths,
            kind,
            q_scores,
            reuse == "draft noise",
        )
        for i, (tree, distributions) in zip(live, trees, strict=False):
            sampling_kinds = (SamplingKind.ROOT,) + (kind,) * tree.num_draft_tokens
            step = len(sequences[i])
            random_source = PositionCoins(i, step, tree.depths()) if reuse == "coins" else HashRandomSource(i, step)
            draft = DrawnTree(tree, sampling_kinds, distributions)
            path, next_token = rule(draft, lambda node, tree=tree: p[tree.token_ids[node]], random_source)
            sequences[i] += [*(tree.token_ids[node] for node in path), next_token]
        live = [i for i in live if len(sequences[i]) <= LENGTH]
    return np.array([sequence[1 : LENGTH + 1] for sequence in sequences])


def excess(tokens: np.ndarray, p: np.ndarray) -> float:
    """Chi-square of the joint of all tokens, in standard deviations above its mean."""
    vocab_size = p.shape[-1]
    cells = list(itertools.product(range(vocab_size), repeat=LENGTH))
    expected = len(tokens) * np.array(
        [np.prod([p[a, b] for a, b in zip((0, *cell), cell, strict=False)]) for cell in cells]
    )
    counts = np.bincount(np.ravel_multi_index(tokens.T, (vocab_size,) * LENGTH), minlength=len(cells))
    degrees = len(cells) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5)


# Two tokens, any context: a pair of laws for which reuse shows clearly (total variation 0.07 and 0.03).
P2, Q2 = np.full((2, 2), 0.5), np.array([[0.2, 0.8]] * 2)
# Three tokens, laws that depend on the last one.
P3 = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.5, 0.1]])
Q3 = np.array([[0.2, 0.3, 0.5], [0.4, 0.3, 0.3], [0.1, 0.6, 0.3]])


@pytest.mark.extended
@pytest.mark.parametrize(
    "rule", ["block", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("rejection", "traversal"))]
)
def test_rounds_on_a_chain_emit_the_target_s_joint_law(rule):
    assert abs(excess(emitted(RULES[rule], IID, (1, 1, 1), P2, Q2, NUM_CHAINS), P2)) < 4


MORE_PAIRS = (("kseq", IID), ("rejection", WOR), ("traversal", IID), ("transport", IID))


@pytest.mark.parametrize(
    "rule, kind",
    [("traversal", WOR), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_PAIRS)],
)
def test_rounds_on_a_tree_emit_the_target_s_joint_law(rule, kind):
    assert abs(excess(emitted(RULES[rule], kind, (2, 1), P3, Q3, NUM_TREES), P3)) < 4


@pytest.mark.extended
@pytest.mark.parametrize("reuse", ["draft noise", pytest.param("coins", marks=pytest.mark.slow)])
def test_a_number_met_twice_biases_block_verification_and_is_found(reuse):
    assert excess(emitted(RULES["block"], IID, (1, 1, 1), P2, Q2, NUM_CHAINS, reuse), P2) > 6


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("kind, widths", [(IID, (1, 1, 1)), (WOR, (2, 1, 1))])
def test_many_rounds_emit_the_target_s_joint_law(rule, kind, widths):
    assert abs(excess(emitted(RULES[rule], kind, widths, P3, Q3, 20_000), P3)) < 4
