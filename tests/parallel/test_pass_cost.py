"""The cost of a pass between, below and above the numbers of rows that were measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.pass_cost import PassCost

tables = st.dictionaries(st.integers(1, 60), st.floats(0, 1), min_size=1, max_size=5)


@settings(deadline=None)
@given(tables, st.integers(1, 80))
def test_a_cost_is_on_the_line_between_its_neighbours(table, rows):
    cost, at = PassCost.table(table), sorted(table)
    if len(at) == 1 or rows <= at[-1]:
        expected = float(np.interp(rows, at, [table[i] for i in at]))
    else:  # the last slope goes on
        slope = (table[at[-1]] - table[at[-2]]) / (at[-1] - at[-2])
        expected = table[at[-1]] + slope * (rows - at[-1])
    assert cost(rows) == pytest.approx(expected, abs=1e-9)
    assert PassCost.flat(0.5)(rows) == 0.5


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0))])
def test_rows_ascend_from_one_on(points):
    with pytest.raises(ValueError, match="rows .* ascending, from 1 on"):
        PassCost(points)


def test_milliseconds_are_a_number_or_a_table():
    assert PassCost.of_ms(15) == PassCost.flat(0.015)
    assert PassCost.of_ms({1: 15, 3: 16.0}) == PassCost(((1, 0.015), (3, 0.016)))


def test_no_pass_takes_less_than_no_time():
    with pytest.raises(ValueError, match="seconds must be 0 or above"):
        PassCost(((1, -0.1),))
    assert PassCost(((1, 0.0),))(3) == 0.0


def test_rows_of_kv_take_their_time_whatever_reads_them():
    cost = PassCost(((1, 1.0), (3, 2.0)), context_s=0.5)
    assert [cost(rows, 10) for rows in (1, 2, 3)] == [6.0, 6.5, 7.0] and cost(1) == 1.0
    with pytest.raises(ValueError, match="0 or above"):
        PassCost(((1, 1.0),), context_s=-1e-9)
