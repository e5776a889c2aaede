"""Running estimates against their definitions: weighted means, weighted least squares, products of chances."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policy.estimators import Ewma, LinearFit, Rate, RequestAcceptance, RoundCosts, Survival

values = st.floats(0.5, 1.0)  # within the bound of outliers, however they are mixed


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


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("row_s", [0.0, 0.004, 0.05])
def test_the_seconds_of_a_round_are_those_of_its_world(row_s, hidden):
    """Drafting is waited for or hidden; a row of the target's pass costs nothing, something, or nearly all of it."""
    costs, lengths, draft_s, verify_s = RoundCosts(), [2, 3, 4, 5] * 40, 0.02, 0.01

    def world(length, mean):
        return 0.002 + (0.0 if hidden else draft_s * length), verify_s + row_s * mean

    for length in lengths:
        gap_s, pass_s = world(length, length / 2)
        costs.update(length, length / 2, gap_s + pass_s, pass_s, draft_s * length)
    slopes = costs.per_token_s(verify_s)
    assert slopes == pytest.approx((0.08 * draft_s if hidden else draft_s, row_s), abs=3e-4)  # 0.08: of the prior
    least_s = np.mean([world(length, length / 2)[1] for length in lengths]) / 2
    rounds = [world(length, length) for length in range(7)]
    expected = [gap_s + max(pass_s, least_s) for gap_s, pass_s in rounds]
    assert costs.seconds(6, slopes) == pytest.approx(expected, rel=0.05, abs=0.3 * draft_s)


def test_slopes_that_cannot_be_measured_are_those_of_the_parts():
    costs = RoundCosts()
    assert costs.per_token_s(0.0) == (0.0, 0.0)
    for _ in range(20):
        costs.update(4, 2.0, 0.030, 0.016, 0.012)
    assert costs.per_token_s(0.010) == pytest.approx((0.003, 0.003)), (
        "drafting by its length, the pass by the plain one"
    )
    assert costs.per_token_s(0.020) == pytest.approx((0.003, 0.0))
    assert costs.per_token_s(0.0) == pytest.approx((0.003, 0.0))
    assert costs.seconds(4, (0.003, 0.003)) == pytest.approx([0.002 + 0.010 + k * 0.006 for k in range(5)])
    assert costs.seconds(0, (0.006, 0.007)) == pytest.approx([0.008]), "no gap below 0, no pass below half the mean"


def accepted(draw: random.Random, chance: float, length: int) -> range:
    """The path of a chain whose tokens are each accepted with `chance`."""
    kept = 0
    while kept < length and draw.random() < chance:
        kept += 1
    return range(1, kept + 1)


@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_survival_of_a_chain_is_that_of_its_tokens(chance):
    draw, survival = random.Random(0), Survival(4)
    means = np.zeros(4)
    for _ in range(4000):
        survival.update(4, accepted(draw, chance, 4))
        means += np.array(survival.chances) / 4000
    assert means == pytest.approx([chance**i for i in (1, 2, 3, 4)], abs=0.02)
    assert survival.expected() == pytest.approx(1 + np.cumsum([0, *survival.chances]))
    assert Survival(9, like=survival).chances == survival.chances


def test_survival_before_anything_was_measured():
    survival = Survival(3)
    assert survival.chances == pytest.approx([0.7, 0.49, 0.343])
    assert survival.expected_accepted(2) == pytest.approx(1.4)
    survival.update(3, [1])
    assert survival.chances == pytest.approx([1, 1e-6, 1e-6]), "the first observation replaces what was expected"
    survival.update(1, [1])
    assert survival.expected_accepted(3) == pytest.approx(1 + survival.chances[1] + 1, rel=0.05)


def test_places_that_are_not_offered_follow_those_that_are():
    survival = Survival(6)
    for _ in range(300):
        survival.update(6, range(1, 7))
    draw = random.Random(0)
    for _ in range(600):
        survival.update(2, accepted(draw, 0.5, 2))
    step = survival.chances[1] ** 0.5
    assert survival.chances[2:] == pytest.approx([survival.chances[1] * step**i for i in (1, 2, 3, 4)], rel=0.5)
    assert survival.chances[5] < 0.15, "an old estimate outlived the text it was made on"
    for _ in range(600):
        survival.update(2, range(1, 3))
    assert survival.chances[5] > 0.8, "and a longer draft is worth a try again"


def test_a_request_is_the_average_until_it_proves_otherwise():
    average = Survival(4)
    assert RequestAcceptance().ratio() == 1
    for num_ordered, num_accepted, ratio in ((4, 0, 4 / 4.7), (4, 4, 8 / 6.8), (4, 2, 6 / 6.1), (1, 1, 5 / 4.7)):
        acceptance = RequestAcceptance()
        acceptance.update(num_ordered, num_accepted, average)  # of the tokens tested the average expects 0.7 each
        assert acceptance.ratio() == pytest.approx(ratio)
    for _ in range(200):
        acceptance.update(4, 4, average)
    assert acceptance.ratio() == 1.25


def test_a_pause_of_the_machine_does_not_make_a_rate():
    rate = Rate()
    assert rate.per_s == 0 == rate.num_rounds
    for _ in range(20):
        rate.update(4, 0.01)
    assert rate.per_s == pytest.approx(400) and rate.num_rounds == pytest.approx((1 - 0.99**20) / 0.01)
    rate.update(4, 10.0)
    assert rate.per_s > 0.9 * 400
