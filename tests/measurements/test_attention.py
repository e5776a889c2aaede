"""The program that times one layer's attention."""

from ctypes import c_int, c_void_p
from dataclasses import replace

import pytest

from docs.measurements.attention import CASES, HEAD, lines
from parallel.kernels.attention import has_attention
from parallel.kernels.library import function

pytestmark = pytest.mark.skipif(not has_attention(), reason="no C++ compiler")
CASE = replace(CASES[0], num_sequences=2, context=20, num_layers=1)


def test_a_row_tells_a_case_its_time_and_its_bits():
    """The rows of a table have the columns of its head, and no two cases share a name."""
    rows = [lines(replace(CASE, num_rows=num_rows), 1, None) for num_rows in (1, 1, 3)]
    digests = [row.split(" | ")[-1] for row in rows]
    assert digests[0] == digests[1] != digests[2]
    assert all(row.count("|") == HEAD.splitlines()[0].count("|") for row in rows)
    assert len({one.name for one in CASES}) == len(CASES)


def test_another_version_has_a_row_of_its_own():
    """Its digest tells whether the bits are equal: here it is the same kernel, and then one that computes nothing."""
    kernel = function("attend_rows", *[c_void_p] * 6, c_int)
    this, same = lines(CASE, 1, kernel).splitlines()
    assert this.split(" | ")[-1] == same.split(" | ")[-1]
    calls = []
    assert len(lines(CASE, 3, lambda *given: calls.append(given)).splitlines()) == 2
    assert len(calls) == 3 + 2
