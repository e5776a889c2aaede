"""What drafting with some layers brings, by measured times of passes, also where these contradict each other."""

from __future__ import annotations

import random

import pytest

from cluster.tools.planning.layer_costs import LayerCosts, contradiction, rising
from parallel.model.layer_plan import LayerPlan

PREFIX = LayerPlan.prefix(2)


def test_the_value_is_the_best_length_by_tokens_over_time():
    costs = LayerCosts.of((1.0, 1.1, 1.3), ends_s=0.2, attention_s=0.6, mlp_s=0.4, num_layers=8)
    assert costs.pass_s(LayerPlan((0,), (0, 1))) == pytest.approx(0.2 + 0.05 + 2 * 0.025)
    found = costs.value((0.9, 0.8), PREFIX)
    assert found.num_draft_tokens == 2 and found.speedup == pytest.approx((1 + 0.9 + 0.8) / (2 * 0.35 + 1.3))
    assert found.pass_share == pytest.approx(0.35) and found.chances == (0.9, 0.8)


@pytest.mark.parametrize("seed", range(20))
def test_no_times_make_more_of_a_round_than_its_tokens(seed):
    """As `job=search` once did: 2.98 times plain decoding with 1 draft token, from a plain pass in a slow moment."""
    draw = random.Random(seed)
    measured = [draw.expovariate(1) for _ in range(7)]
    parts = [draw.expovariate(1) for _ in range(3)]
    for num_draft_tokens in range(1, 7):
        costs = LayerCosts.of(measured[: 1 + num_draft_tokens], *parts, num_layers=3)
        found = costs.value((1.0,) * num_draft_tokens, PREFIX)
        assert found.speedup < found.num_draft_tokens + 1


def test_times_that_rise_stay_and_others_become_the_mean_of_neighbours():
    assert rising((1.0, 2.0, 2.0, 5.0)) == [1.0, 2.0, 2.0, 5.0]
    assert rising((3.0, 1.0, 2.0, 4.0)) == [2.0, 2.0, 2.0, 4.0]
    assert rising((1.0, 4.0, 3.0, 2.0, 6.0)) == [1.0, 3.0, 3.0, 3.0, 6.0]


def test_a_contradiction_is_named_and_chance_is_not():
    assert contradiction((1.0, 0.9, 1.1), 1.3) == ""
    assert contradiction((1.0, 1.4, 0.7), 1.0) == (
        "a pass of the target over 3 rows took 0.50 of the time of one over fewer"
    )
    assert contradiction((1.0, 1.1), 0.25) == "the parts of a pass of the target took 0.25 of the time of the whole"
