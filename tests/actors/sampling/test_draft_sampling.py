"""Draft draws: from exactly the law that is sent along, in draw order, never twice from the same noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.protocol.messages import SamplingParams
from actors.sampling.draft_sampling import draw_iid, draw_without_replacement

SAMPLED = SamplingParams(temperature=1.0)
SCORES = torch.log(torch.tensor([[0.30, 0.05, 0.25, 0.10, 0.16, 0.14]]))


def many(draw, n: int, width: int, top_m: int, scores: torch.Tensor = SCORES):
    """The same row drawn at n steps."""
    return draw(scores.expand(n, -1), [SAMPLED] * n, range(n), [3] * n, width, top_m)


def chi_square(observed: dict, expected: dict, n: int) -> tuple[float, float]:
    """(statistic, limit at five standard deviations)."""
    assert observed.keys() <= expected.keys()
    value = sum((observed.get(cell, 0) - n * e) ** 2 / (n * e) for cell, e in expected.items())
    degrees = len(expected) - 1
    return value, degrees + 5 * (2 * degrees) ** 0.5


def count(drawn) -> dict:
    counts: dict = {}
    for d in drawn:
        counts[d.token_ids] = counts.get(d.token_ids, 0) + 1
    return counts


@pytest.mark.parametrize("draw", [draw_iid, draw_without_replacement])
def test_the_law_is_the_renormalised_top_m(draw):
    (drawn,) = many(draw, 1, width=2, top_m=4)
    assert drawn.distribution.token_ids == (0, 2, 4, 5)
    np.testing.assert_allclose(drawn.distribution.probs, np.array([0.30, 0.25, 0.16, 0.14]) / 0.85, rtol=1e-6)
    assert sum(drawn.distribution.probs) == pytest.approx(1.0, abs=1e-15)
    assert set(drawn.token_ids) <= set(drawn.distribution.token_ids)


def test_without_replacement_follows_the_sequential_law():
    n = 8_000
    drawn = many(draw_without_replacement, n, width=2, top_m=4)
    q = dict(zip(drawn[0].distribution.token_ids, drawn[0].distribution.probs, strict=False))
    expected = {(a, b): q[a] * q[b] / (1 - q[a]) for a in q for b in q if a != b}
    value, limit = chi_square(count(drawn), expected, n)
    assert value < limit


def test_independent_draws_follow_the_product_law_and_keep_duplicates():
    n = 8_000
    drawn = many(draw_iid, n, width=2, top_m=3)
    q = dict(zip(drawn[0].distribution.token_ids, drawn[0].distribution.probs, strict=False))
    value, limit = chi_square(count(drawn), {(a, b): q[a] * q[b] for a in q for b in q}, n)
    assert value < limit


@pytest.mark.parametrize("draw", [draw_iid, draw_without_replacement])
def test_noise_is_keyed_by_seed_step_and_node(draw):
    scores = torch.zeros(1, 1000)

    def once(seed: int, step: int, node: int) -> tuple[int, ...]:
        return draw(scores, [SamplingParams(temperature=1.0, seed=seed)], [step], [node], 3, 1000)[0].token_ids

    assert once(1, 2, 3) == once(1, 2, 3)
    assert len({once(1, 2, 3), once(2, 2, 3), once(1, 3, 3), once(1, 2, 4)}) == 4


def test_a_row_does_not_depend_on_its_batch():
    scores = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    together = draw_without_replacement(scores, [SAMPLED] * 5, [7] * 5, range(5), 3, 32)
    for row in range(5):
        assert draw_without_replacement(scores[row : row + 1], [SAMPLED], [7], [row], 3, 32) == [together[row]]


def test_a_small_support_yields_all_of_it_and_nothing_banned():
    scores = torch.full((1, 8), -torch.inf)
    scores[0, [2, 6]] = torch.tensor([1.0, 0.0])
    for drawn in many(draw_without_replacement, 50, width=4, top_m=6, scores=scores):
        assert sorted(drawn.token_ids) == [2, 6]
        assert drawn.distribution.token_ids == (2, 6)
    for drawn in many(draw_iid, 50, width=4, top_m=6, scores=scores):
        assert len(drawn.token_ids) == 4 and set(drawn.token_ids) <= {2, 6}


@pytest.mark.filterwarnings("error")
def test_what_the_division_rounds_to_zero_is_not_drawn():
    """A rule refuses a token that cannot have been drawn."""
    scores = torch.tensor([[0.0, 0.0, 0.0, -744.4]])
    (drawn,) = draw_without_replacement(scores, [SAMPLED], [0], [0], 4, 4)
    assert sorted(drawn.token_ids) == sorted(drawn.distribution.token_ids) == [0, 1, 2]


@pytest.mark.parametrize("draw", [draw_iid, draw_without_replacement])
def test_greedy_draws_from_a_one_hot_law(draw):
    (drawn,) = draw(SCORES, [SamplingParams()], [0], [0], 2, 4)
    assert drawn.distribution.token_ids == (0,) and drawn.distribution.probs == (1.0,)
    assert set(drawn.token_ids) == {0}
