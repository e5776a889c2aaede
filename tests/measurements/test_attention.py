"""The program that times one layer's attention."""

from dataclasses import replace

import pytest

from docs.measurements.attention import CASES, HEAD, line
from parallel.kernels.attention import has_attention

pytestmark = pytest.mark.skipif(not has_attention(), reason="no C++ compiler")


def test_a_row_tells_a_case_its_time_and_its_bits():
    """The rows of a table have the columns of its head, and no two cases share a name."""
    case = replace(CASES[0], num_sequences=2, context=20, num_layers=1)
    rows = [line(replace(case, num_rows=num_rows), repeats=1) for num_rows in (1, 1, 3)]
    digests = [row.split(" | ")[-1] for row in rows]
    assert digests[0] == digests[1] != digests[2]
    assert all(row.count("|") == HEAD.splitlines()[0].count("|") for row in rows)
    assert len({one.name for one in CASES}) == len(CASES)
