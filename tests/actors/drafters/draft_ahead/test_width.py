"""How wide a pass of draft-ahead should be, from what passes cost and which outcomes are likely."""

from __future__ import annotations

from itertools import cycle

import pytest

from actors.drafters.draft_ahead.width import WidthChooser

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
