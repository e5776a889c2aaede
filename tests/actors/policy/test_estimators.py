"""Running estimates against what they are fed."""

from __future__ import annotations

import random

import pytest

from actors.policy.estimators import LinearFit, Rate, RequestAcceptance, RoundCosts, Survival


def accepted(draw: random.Random, chance: float, length: int) -> range:
    """The path of a chain whose tokens are each kept with `chance`."""
    kept = 0
    while kept < length and draw.random() < chance:
        kept += 1
    return range(1, kept + 1)


@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_survival_of_a_chain_is_that_of_its_coins(chance):
    draw, survival = random.Random(0), Survival(4)
    means = [0.0] * 4
    for _ in range(4000):
        survival.update(4, accepted(draw, chance, 4))
        means = [mean + value / 4000 for mean, value in zip(means, survival.chances, strict=True)]
    assert means == pytest.approx([chance**i for i in (1, 2, 3, 4)], abs=0.02)
    assert survival.expected()[4] == pytest.approx(1 + sum(survival.chances))


def test_places_that_are_not_offered_follow_those_that_are():
    survival = Survival(6)
    for _ in range(300):
        survival.update(6, range(1, 7))
    assert survival.chances[5] == pytest.approx(1, abs=0.01)
    draw = random.Random(0)
    for _ in range(600):
        survival.update(2, accepted(draw, 0.5, 2))
    assert survival.chances[5] < 0.15, "an old opinion outlived the text it was formed on"
    for _ in range(600):
        survival.update(2, range(1, 3))
    assert survival.chances[5] > 0.8, "and a new one is worth a try"


def test_a_request_is_the_average_until_proved_otherwise():
    acceptance, average = RequestAcceptance(), Survival(4)
    assert acceptance.ratio() == 1
    for _ in range(30):
        acceptance.update(4, 0, average)
    assert acceptance.ratio() < 0.3
    for _ in range(200):
        acceptance.update(4, 4, average)
    assert acceptance.ratio() > 1, "it fares better than the average now"


def test_a_line_finds_its_slope_and_keeps_the_expected_one_where_it_cannot():
    line = LinearFit()
    for x in (1, 2, 3) * 20:
        line.update(x, 5 + 2 * x)
    assert line.slope(prior=0.0, stiffness=0.01) == pytest.approx(2, abs=0.05)
    still = LinearFit()
    for _ in range(50):
        still.update(4, 10)
    assert still.slope(prior=1.5, stiffness=0.01) == pytest.approx(1.5)


def test_costs_tell_hidden_drafting_from_drafting_that_is_waited_for():
    waited, hidden = RoundCosts(), RoundCosts()
    for length in (2, 3, 4) * 20:
        waited.update(length, length, 0.010 + 0.002 * length, 0.010, 0.002 * length)
        hidden.update(length, length, 0.011, 0.010, 0.002 * length)
    assert waited.per_token_s(0.010)[0] == pytest.approx(0.002, rel=0.05)
    assert hidden.per_token_s(0.010)[0] < 0.0006
    assert waited.seconds(6, waited.per_token_s(0.010))[6] == pytest.approx(0.022, rel=0.02)


def test_a_hiccup_does_not_make_a_rate():
    rate = Rate()
    for _ in range(20):
        rate.update(4, 0.01)
    steady = rate.per_s
    rate.update(4, 10.0)
    assert rate.per_s > 0.8 * steady
