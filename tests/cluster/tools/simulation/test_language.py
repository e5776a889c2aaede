"""The synthetic language draws with the given probabilities, and pass costs interpolate the measured points."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from cluster.tools.simulation import Language, PassCost, power_law
from cluster.tools.simulation.language import RequestText

NUM_POSITIONS = 8000


def ranks(language, distance=0):
    """How often the target's token is the drafter's choice of each rank, counted from 0; None where it is in none."""
    text = language.text(7)
    count = 1 + len(language.runners_up)
    found = Counter()
    for position in range(NUM_POSITIONS):
        tokens, _ = text.children(position, distance, count)
        assert len(set(tokens)) == count, "siblings differ"
        truth = text.token(position)
        found[tokens.index(truth) if truth in tokens else None] += 1
    return {rank: times / NUM_POSITIONS for rank, times in found.items()}


def three_sigma(p):
    return 3 * math.sqrt(p * (1 - p) / NUM_POSITIONS)


@pytest.mark.parametrize("unevenness", [0.0, 1.0])
def test_ranks_are_as_probable_as_the_drafter_says(unevenness):
    language = Language((0.7,), (0.5, 0.2, 0.1), unevenness=unevenness)
    expected = {0: 0.7, 1: 0.3 * 0.5, 2: 0.3 * 0.2, 3: 0.3 * 0.1, None: 0.3 * 0.2}
    found = ranks(language)
    for rank, p in expected.items():
        assert found[rank] == pytest.approx(p, abs=three_sigma(p))


def test_log_probs_are_calibrated_where_doubt_is_uneven():
    """A drafter that is surer is right more often, and as often as its probabilities state."""
    language = Language((0.7,), (0.5,), unevenness=1.5)
    text, sure = language.text(0), []
    for position in range(NUM_POSITIONS):
        tokens, log_probs = text.children(position, 0, 1)
        if log_probs[0] > math.log(0.9):
            sure.append((math.exp(log_probs[0]), tokens[0] == text.token(position)))
    said, right = (sum(column) / len(sure) for column in zip(*sure, strict=True))
    assert len(sure) > NUM_POSITIONS / 5
    assert right == pytest.approx(said, abs=0.01) and said > 0.93


def test_acceptance_by_distance_and_its_last_value_repeats():
    language = Language((0.9, 0.6))
    for distance, p in ((0, 0.9), (1, 0.6), (5, 0.6)):
        assert ranks(language, distance)[0] == pytest.approx(p, abs=three_sigma(p))


def first_tokens(text: RequestText) -> list[int]:
    return [text.token(position) for position in range(60)]


def test_text_does_not_depend_on_the_order_of_reads():
    one, other = Language(seed=3).text(1, (5, 6)), Language(seed=3).text(1, (5, 6))
    late = one.children(50, 0, 4)
    assert first_tokens(one) == first_tokens(other) and late == other.children(50, 0, 4)
    assert first_tokens(one)[:2] == [5, 6]
    assert first_tokens(Language(seed=4).text(1)) != first_tokens(Language(seed=3).text(1))
    assert first_tokens(Language(seed=3).text(2)) != first_tokens(Language(seed=3).text(1))


def test_power_law_misses():
    shares = power_law(0.5, count=20)
    for fan_out in (1, 4, 19):
        assert 1 - sum(shares[:fan_out]) == pytest.approx((fan_out + 1) ** -0.5)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("acceptance", dict(acceptance=())),
        ("acceptance", dict(acceptance=(1.2,))),
        ("runners_up", dict(runners_up=(0.8, 0.4))),
        ("unevenness", dict(acceptance=(0.3,), unevenness=1.0)),
        ("vocab_size", dict(vocab_size=4)),
    ],
)
def test_a_language_that_makes_no_sense_names_the_field(field, values):
    with pytest.raises(ValueError, match=f"language.{field}="):
        Language(**values)


def test_pass_cost_is_a_line_between_points_and_flat_below():
    cost = PassCost.table({8: 2.0, 2: 1.0, 16: 6.0})
    assert [cost(rows) for rows in (1, 2, 5, 8, 12, 16, 20)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert PassCost.flat(3.0)(1) == PassCost.flat(3.0)(500) == 3.0


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((4, 1.0), (2, 1.0)), ((1, -1.0),)])
def test_pass_cost_refuses(points):
    with pytest.raises(ValueError, match="pass cost"):
        PassCost(points)
