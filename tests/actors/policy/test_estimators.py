"""Running estimates against their definitions: weighted means and weighted least squares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policy.estimators import ROUND_MEMORY, Ewma, LinearFit

values = st.floats(0.5, 1.0)  # within the bound of outliers, however they are mixed


@pytest.mark.extended
@settings(deadline=None)
@given(st.lists(st.tuples(values, st.integers(1, 5)), min_size=1), st.floats(0.5, 1.0))
def test_a_mean_weighs_an_observation_by_its_count_and_its_age(observed, memory):
    estimate = Ewma(memory)
    for value, count in observed:
        estimate.update(value, count)
    ages = memory ** np.arange(len(observed))[::-1]
    weights = ages * [count for _, count in observed]
    assert estimate.weight == pytest.approx(weights.sum())
    assert estimate.total == pytest.approx(weights @ [value for value, _ in observed])
    assert estimate.mean == pytest.approx(estimate.total / estimate.weight)
    estimate.decay(0.25)
    assert estimate.weight == pytest.approx(weights.sum() / 4)


def test_an_outlier_counts_as_so_many_means_once_the_mean_is_known():
    for number, counted in ((4, 100.0), (5, 2.0)):
        clamped, plain = Ewma(1.0, outlier=2.0), Ewma(1.0)
        for estimate in (clamped, plain):
            for _ in range(number):
                estimate.update(1.0)
            estimate.update(100.0)
        assert plain.total == number + 100 and clamped.total == pytest.approx(number + counted)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), values), min_size=2), st.floats(0.0, 2.0), st.floats(0.01, 1.0))
def test_a_line_is_the_least_squares_fit_with_a_prior_for_its_slope(points, prior, stiffness):
    line = LinearFit()
    for x, y in points:
        line.update(x, y)
    x, y = np.array(points, dtype=float).T
    weights = 0.97 ** np.arange(len(points))[::-1]
    weights /= weights.sum()
    off_x, off_y = x - weights @ x, y - weights @ y
    # the minimum of sum(w * (off_y - slope * off_x)^2) + stiffness * (slope - prior)^2
    slope = (weights @ (off_x * off_y) + stiffness * prior) / (weights @ off_x**2 + stiffness)
    assert line.slope(prior, stiffness) == pytest.approx(max(0, slope))
    assert line.at(5, 0.5) == pytest.approx(weights @ y + 0.5 * (5 - weights @ x))
    line.decay(0.25)
    line.update(5, 0.5)
    assert line.weight == pytest.approx(0.97 * 0.25 * sum(0.97**age for age in range(len(points))) + 1)
    assert line.mean_y == pytest.approx(weights @ y + (0.5 - weights @ y) / line.weight), "less of the past counts"


def test_an_outlier_of_a_line_is_judged_at_its_place_on_it():
    """y = 1 + x; a point at 9 may have up to twice the 10 that the line says there, once at 0 up to 2 * 1."""
    for x, y, counted in ((9, 10.0, 10.0), (9, 100.0, 20.0), (0, 100.0, 2.0)):
        line = LinearFit(1.0)
        for _ in range(5):
            line.update(0, 1.0)
        line.update(x, y, 1.0)
        assert line.mean_y == pytest.approx((5 + counted) / 6)
    early = LinearFit(1.0, corrects_first=True)
    early.update(9, 10.0, 1.0)
    early.update(0, 1.0, 1.0)
    assert early.mean_y == pytest.approx(5.5), "the first was no pause, at its place"


def test_what_a_line_says_far_from_its_points_has_little_weight():
    """The inverse of the variance of a prediction, in observations: 1 / (1 / n + (x - mean)^2 / sum of squares)."""
    line, points = LinearFit(1.0), [0.0, 2.0, 4.0, 2.0]
    for x in points:
        line.update(x, 1.0)
    for x in (2.0, 3.0, 10.0):
        assert line.weight_at(x, 0.0) == pytest.approx(1 / (1 / 4 + (x - 2) ** 2 / np.sum((np.array(points) - 2) ** 2)))
    assert line.weight_at(10.0, 1.0) > line.weight_at(10.0, 0.0), "a prior of the slope is some knowledge"


def test_an_outlier_counts_as_two_means_in_a_line_whenever_it_came():
    late, early, plain = LinearFit(1.0), LinearFit(1.0, corrects_first=True), LinearFit(1.0)
    for _ in range(5):
        late.update(1, 1.0)
    late.update(1, 100.0)
    assert late.mean_y == pytest.approx((5 * 1 + 2) / 6)
    for line in (early, plain):
        line.update(1, 100.0)
        line.update(1, 1.0)
    assert plain.mean_y == 50.5
    assert early.mean_y == pytest.approx((2 + 1) / 2), "once there is an ordinary one, the first shows as an outlier"


@pytest.mark.parametrize(("every", "least"), [(2, 0.9), (4, 0.9), (20, 0.0)])
def test_what_is_common_is_no_outlier(every, least):
    """Rounds that find their draft prepared wait for nothing, those that do not wait for an exchange."""
    line = LinearFit(corrects_first=True)
    for number in range(200):
        line.update(4, 70e-3 if number % every == 0 else 0.1e-3)
    mean = 70e-3 / every
    assert least * mean < line.mean_y < 1.2 * mean
    assert every < 20 or line.mean_y < 0.1 * mean, "rare ones are pauses"


@pytest.mark.parametrize(("count", "kept"), [(1, 0.98), (4, 0.98**4), (64, ROUND_MEMORY)])
def test_a_round_is_forgotten_with_each_of_its_requests_but_by_no_more_than_an_eighth(count, kept):
    estimate = Ewma(0.98, mean=2.0, weight=5.0)
    estimate.update_round(range(count))
    assert estimate.weight == pytest.approx(5 * kept + count)
    assert estimate.total == pytest.approx(10 * kept + sum(range(count)))
