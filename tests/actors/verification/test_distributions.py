"""What ratio tests compute with, against the same formulas on dense rows."""

from __future__ import annotations

import numpy as np
import pytest

from actors.protocol.messages import SamplingKind, SparseDistribution, TokenTree
from actors.verification.distributions import NO_MASS, ChildDistribution, DrawnTree, Residual, child_distributions

ROOT, DET, COUPLED, IID, WOR = SamplingKind
VOCAB = 7
LAW = SparseDistribution((5, 1, 3, 0), (0.4, 0.3, 0.2, 0.1))


def dense(child: ChildDistribution) -> np.ndarray:
    row = np.zeros(VOCAB)
    row[child.token_ids] = child.probs
    return row


def siblings(*drawn: tuple[int, SamplingKind]) -> list[ChildDistribution]:
    """The distributions of the children of a root, given their tokens and kinds."""
    tree = TokenTree((2, *(token for token, _ in drawn)), (-1, *[0] * len(drawn)))
    kinds = (ROOT, *(kind for _, kind in drawn))
    draft = DrawnTree(tree, kinds, (LAW, *[None] * len(drawn)))
    return child_distributions(draft, 0, range(1, len(drawn) + 1))


def test_independent_draws_all_follow_the_draft_s_distribution():
    full = np.array([0.1, 0.3, 0, 0.2, 0, 0.4, 0])
    found = siblings((1, IID), (1, IID), (5, IID))
    assert [dense(one).tolist() for one in found] == [full.tolist()] * 3
    assert [one.own for one in found] == [0.3, 0.3, 0.4]


def test_a_draw_without_replacement_follows_what_its_siblings_of_that_kind_left():
    found = siblings((5, WOR), (1, DET), (3, WOR), (5, IID), (1, WOR), (0, COUPLED))
    expected = [
        ([0.1, 0.3, 0, 0.2, 0, 0.4, 0], 0.4),
        ([0, 1, 0, 0, 0, 0, 0], 1.0),
        ([1 / 6, 3 / 6, 0, 2 / 6, 0, 0, 0], 2 / 6),
        ([0.1, 0.3, 0, 0.2, 0, 0.4, 0], 0.4),
        ([1 / 4, 3 / 4, 0, 0, 0, 0, 0], 3 / 4),
        ([1, 0, 0, 0, 0, 0, 0], 1.0),
    ]
    for one, (row, own) in zip(found, expected, strict=True):
        np.testing.assert_allclose(dense(one), row, atol=1e-15)
        assert one.own == pytest.approx(own)


@pytest.mark.parametrize("drawn", [[(4, IID)], [(6, WOR)], [(5, WOR), (5, WOR)]])
def test_a_token_that_cannot_have_been_drawn_is_refused(drawn):
    with pytest.raises(AssertionError, match="cannot have been drawn"):
        siblings(*drawn)


@pytest.mark.parametrize("seed", range(20))
def test_a_residual_is_the_positive_part_of_the_scaled_target_minus_the_drafts(seed):
    """norm((scale * P - q)+), sibling after sibling, and the mass left before each normalisation; P without any."""
    rng = np.random.default_rng(seed)
    target = rng.dirichlet(np.ones(VOCAB))
    residual, p = Residual(target), target.copy()
    for scale in (1.0, 0.7, 1.0, 0.3):
        support = rng.permutation(VOCAB)[:4]
        child = ChildDistribution(support, rng.dirichlet(np.ones(4)), int(support[0]), 1)
        left = np.maximum(scale * p - dense(child), 0.0)
        assert residual.subtract(child, scale) == pytest.approx(left.sum())
        p = left / left.sum() if left.any() else target
        np.testing.assert_allclose([residual.probability(token) for token in range(VOCAB)], p, atol=1e-12)
        np.testing.assert_allclose(residual.weights / residual.mass, p, atol=1e-12)
        assert residual.weights.sum() == pytest.approx(residual.mass)
    assert target.sum() == pytest.approx(1.0), "the row itself is not changed"


@pytest.mark.parametrize("spare", [0.0, NO_MASS / 2])
def test_without_a_residual_the_target_starts_again(spare):
    target = np.array([0.25, 0.75 - spare, spare])
    residual = Residual(target)
    same = ChildDistribution(np.array([0, 1]), np.array([0.25, 0.75]), 1, 1)
    assert residual.subtract(same) <= NO_MASS
    assert residual.weights.tolist() == target.tolist() and residual.mass == pytest.approx(1.0)
    assert residual.probability(1) == pytest.approx(0.75)
    residual.subtract(ChildDistribution(np.array([0]), np.ones(1), 0, 2))
    assert target[0] == 0.25, "it subtracts from a copy"
