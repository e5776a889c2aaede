"""Counts against laws: known tails, real false-alarm rates, and the power that is claimed."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.tools.certify.goodness import detectable_distance, fit_distribution, fit_share, rejected, tail

LAW = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


def counts_of(distribution, num_draws, seed):
    return np.random.default_rng(seed).multinomial(num_draws, distribution)


@pytest.mark.parametrize(("degrees", "statistic", "expected"), [(1, 3.841, 0.05), (10, 18.307, 0.05), (5, 0.0, 1.0)])
def test_tails_are_those_of_the_tables(degrees, statistic, expected):
    assert tail(degrees, statistic) == pytest.approx(expected, abs=1e-4)


def test_a_right_law_is_rejected_as_often_as_said():
    fits = [fit_distribution("right", counts_of(LAW, 2000, seed), LAW) for seed in range(1000)]
    assert 0.03 < np.mean([fit.p_value < 0.05 for fit in fits]) < 0.07


@pytest.mark.parametrize("num_cells", [2, 20])
def test_a_bias_of_the_visible_size_is_found_as_often_as_said(num_cells):
    """The hardest shape: half of the mass gives evenly to the other half."""
    distribution = np.full(num_cells, 1.0 / num_cells)
    distance = detectable_distance(4000, num_cells, significance=0.001, power=0.9)
    biased = distribution + np.repeat([1.0, -1.0], num_cells // 2) * 2 * distance / num_cells
    found = [
        fit_distribution("biased", counts_of(biased, 4000, seed), distribution).p_value < 0.001 for seed in range(600)
    ]
    assert 0.85 < np.mean(found) < 0.95


def test_more_draws_and_fewer_cells_show_less_bias():
    assert detectable_distance(40_000, 20, 0.001, 0.99) < detectable_distance(10_000, 20, 0.001, 0.99) / 1.9
    assert detectable_distance(10_000, 2, 0.001, 0.99) < detectable_distance(10_000, 20, 0.001, 0.99)
    assert detectable_distance(10, 20, 0.001, 0.99) == 1.0, "ten draws show nothing"


def test_rare_tokens_are_counted_together():
    distribution = np.array([0.5, 0.4, *[0.001] * 100])
    fit = fit_distribution("tail", counts_of(distribution, 1000, 0), distribution)
    assert fit.num_cells == 3
    shifted = fit_distribution("tail", np.array([400, 500, *[1] * 100]), distribution)
    assert shifted.distance == pytest.approx(0.1), "half of the sum of |0.4 - 0.5|, |0.5 - 0.4| and |0.1 - 0.1|"
    few = fit_distribution("few", np.array([9, 1]), np.array([0.95, 0.05]))
    assert few.num_cells == 1 and few.p_value == 1.0, "too few draws to compare anything"


def test_a_token_that_cannot_occur_is_never_right():
    assert fit_distribution("impossible", np.array([999, 1000, 1]), np.array([0.5, 0.5, 0.0])).p_value == 0.0


def test_a_share_is_compared_from_both_sides():
    assert fit_share("half", 520, 1000, 0.5).p_value > 0.1
    assert fit_share("half", 600, 1000, 0.5).p_value < 1e-6
    assert fit_share("half", 400, 1000, 0.5).p_value < 1e-6


@pytest.mark.extended
def test_many_comparisons_have_one_significance():
    """Ten right laws a family: a thousandth each would be one in a hundred together."""
    families = [
        [fit_distribution("right", counts_of(LAW, 500, 10 * seed + i), LAW) for i in range(10)] for seed in range(400)
    ]
    assert np.mean([bool(rejected(family, 0.05)) for family in families]) < 0.08
    biased = fit_distribution("biased", counts_of(LAW[::-1], 500, 0), LAW)
    assert [fit.name for fit in rejected([*families[0], biased], 0.001)] == ["biased"]
