"""How wide a pass of draft-ahead should be, from what passes cost and which outcomes are likely."""

from __future__ import annotations

import random
from itertools import cycle

import pytest

from actors.drafters.draft_ahead.width import WidthChooser
from actors.policy.estimators import LinearFit

LIKELY = [0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05]
MS = 1e-3


def seen(fixed_s: float, per_row_s: float) -> WidthChooser:
    width_chooser = WidthChooser()
    for _, num_rows in zip(range(40), cycle((1, 3, 8)), strict=False):
        width_chooser.update(num_rows, fixed_s + per_row_s * num_rows)
    return width_chooser


def test_rows_that_cost_nothing_are_all_used():
    assert seen(1 * MS, 0.0).width([LIKELY], 5, 3 * MS, 8) == 8


def test_rows_that_cost_as_much_as_passes_are_used_for_the_likeliest_outcome():
    assert seen(0.0, 1 * MS).width([LIKELY], 5, 5 * MS, 8) == 1


def test_time_left_over_goes_into_further_outcomes():
    width_chooser = seen(0.2 * MS, 0.8 * MS)
    assert [width_chooser.width([LIKELY], 5, time_s, 8) for time_s in (2 * MS, 8 * MS, 40 * MS)] == [1, 2, 8]


def test_requests_share_the_time():
    width_chooser = seen(0.5 * MS, 0.5 * MS)
    assert width_chooser.width([LIKELY] * 6, 5, 12 * MS, 8) < width_chooser.width([LIKELY], 5, 12 * MS, 8)


def test_outcomes_that_are_not_known_are_worth_nothing():
    assert seen(1 * MS, 0.1 * MS).width([LIKELY[:2]], 5, 20 * MS, 8) == 2


@pytest.mark.parametrize("width_chooser, time_s", [(WidthChooser(), 5 * MS), (seen(1 * MS, 0.0), 0.0)])
def test_before_anything_is_measured_it_starts_with_a_few(width_chooser, time_s):
    assert width_chooser.width([LIKELY], 5, time_s, 8) == 4 and width_chooser.width([LIKELY], 5, time_s, 2) == 2


@pytest.mark.parametrize("seed", range(20))
def test_the_best_width_has_the_most_tokens_ready(seed):
    """The formula for every width: chances reached, times the passes that fit, at most the wanted length."""
    draw = random.Random(seed)
    fixed_s, per_row_s = draw.uniform(0.5, 2) * MS, draw.uniform(0.01, 1) * MS
    width_chooser, line = seen(fixed_s, per_row_s), LinearFit()
    for _, num_rows in zip(range(40), cycle((1, 3, 8)), strict=False):
        line.update(num_rows, fixed_s + per_row_s * num_rows)
    outcomes = [
        sorted((draw.random() / 4 for _ in range(draw.randrange(1, 9))), reverse=True)
        for _ in range(draw.randrange(1, 4))
    ]
    length, time_s, widest = draw.randrange(1, 6), draw.uniform(0.5, 20) * MS, 8
    slope = line.slope(0.0, 0.5)

    def ready(width):
        seconds = max(0.0, line.at(0, slope)) + slope * width * len(outcomes)
        return sum(sum(one[:width]) for one in outcomes) * min(length, time_s / seconds)

    expected = max(range(1, widest + 1), key=lambda width: (round(ready(width), 12), -width))
    assert width_chooser.width(outcomes, length, time_s, widest) == expected


@pytest.mark.parametrize(("num_passes", "is_known"), [(14, False), (15, True)])
def test_costs_decide_once_a_dozen_passes_weigh_in(num_passes, is_known):
    """The weights of the last passes add up to 12 at the fifteenth: (1 - 0.97^15) / 0.03."""
    width_chooser = WidthChooser()
    for _, num_rows in zip(range(num_passes), cycle((1, 3, 8)), strict=False):
        width_chooser.update(num_rows, 1 * MS)
    assert width_chooser.width([LIKELY], 5, 20 * MS, 8) == (8 if is_known else 4)
