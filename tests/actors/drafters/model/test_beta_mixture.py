"""The mixture of two Beta distributions: it finds the ones that gaps were drawn from, and where they cross."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributions import Beta

from actors.drafters.model.beta_mixture import BetaMixture, MomentFit

WRONG, RIGHT, SHARE_RIGHT = (2.0, 5.0), (5.0, 2.0), 0.7


def chance_right(gap, wrong, right):
    """The chance that a token with this gap is right, by Bayes' rule, were every second one right."""
    likely, unlikely = (Beta(*one).log_prob(torch.tensor(gap)).exp().item() for one in (right, wrong))
    return likely / (likely + unlikely)


def fitted(num, *, seed=0, after=lambda mixture: None):
    mixture, draw = BetaMixture(), random.Random(seed)
    for _ in range(num):
        is_right = draw.random() < SHARE_RIGHT
        mixture.update(draw.betavariate(*(RIGHT if is_right else WRONG)), is_right=is_right)
        after(mixture)
    return mixture


@pytest.mark.parametrize("start", [(1.0, 2.0), (2.0, 1.0), (0.4, 0.7)])
def test_a_fit_begins_as_what_it_is_given(start):
    assert MomentFit(*start).parameters == pytest.approx(start)


def test_both_distributions_are_found():
    found = []
    fitted(4000, after=lambda mixture: found.append((*mixture.wrong.parameters, *mixture.right.parameters)))
    means = [sum(each) / len(each) for each in zip(*found[1000:], strict=True)]
    assert means == pytest.approx((*WRONG, *RIGHT), rel=0.15)


@pytest.mark.extended
@pytest.mark.parametrize("least", [0.2, 0.4, 0.7, 0.9])
def test_the_threshold_is_where_the_densities_have_these_odds(least):
    found = []
    fitted(4000, after=lambda mixture: found.append(mixture.threshold(least)))
    odds = least / (1 - least)
    expected = odds ** (1 / 3) / (1 + odds ** (1 / 3))  # the densities' ratio is (x / (1 - x)) ** 3
    assert sum(found[1000:]) / len(found[1000:]) == pytest.approx(expected, abs=0.02)
    assert max(abs(one - expected) for one in found[1000:]) < 0.12, "and never far from it"


def test_before_any_verdict_a_gap_is_its_own_chance_within_bounds():
    """Beta(2, 1) and Beta(1, 2) have the densities 2 x and 2 (1 - x)."""
    for least, gap in ((0.15, 0.3), (0.4, 0.4), (0.7, 0.7), (0.95, 0.9)):
        assert BetaMixture().threshold(least) == pytest.approx(gap, abs=0.0101)


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("gap", [0.0, 0.5, 1.0])
def test_gaps_that_are_all_one_have_a_fit(gap, is_right):
    """No Beta distribution has their moments. A certain token is followed by another, a doubtful one is not."""
    mixture = BetaMixture()
    for _ in range(5000):
        mixture.update(gap, is_right=is_right)
    one = mixture.right if is_right else mixture.wrong
    assert min(one.parameters) > 0 and one.parameters[0] / sum(one.parameters) == pytest.approx(gap, abs=1e-3)
    assert all(0.3 <= mixture.threshold(least) <= 0.9 for least in (0.01, 0.4, 0.99))


def test_densities_that_cross_twice_leave_a_threshold():
    """Those of the gaps tried that are above it are as many as are right with that chance."""
    mixture, draw = BetaMixture(), random.Random(1)
    for _ in range(4000):
        is_right = draw.random() < 0.5
        mixture.update(draw.betavariate(*((12, 8) if is_right else (0.5, 0.5))), is_right=is_right)
    reached = [i for i in range(30, 91) if chance_right(i / 100, (0.5, 0.5), (12.0, 8.0)) >= 0.5]
    assert reached[0] > 30 and reached[-1] < 90, "wrong tokens are the likelier ones on both sides"
    assert mixture.threshold(0.5) == pytest.approx(0.91 - len(reached) / 100, abs=0.08)
