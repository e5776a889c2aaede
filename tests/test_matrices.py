"""The selection of a matrix that the default run touches."""

from __future__ import annotations

import tomllib
from itertools import combinations, product
from pathlib import Path

import pytest

from tests import matrices
from tests.conftest import DEFAULT_MARKS
from tests.matrices import in_turn


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    monkeypatch.setattr(matrices, "is_whole", True)


def usual(matrix):
    return [param.values for param in matrix if not param.marks]


def test_all_combinations_of_two_columns_are_there_once():
    for times in (None, {"a": 0, "b": 2}):
        rows = [param.values for param in in_turn("abc", [1, 2, 3], times=times)]
        assert sorted(rows) == sorted(product("abc", [1, 2, 3]))


@pytest.mark.parametrize("times", [None, {"a": 0, "b": 9}])
def test_of_more_columns_each_pair_is_there_in_few_rows(times):
    columns = "abcdef", range(5), [1, 2, 3], [True, False]
    rows = [param.values for param in in_turn(*columns, times=times)]
    assert len({*rows}) == len(rows) == 6 * 5 + 4 * ("b" in (times or {}))
    for i, j in combinations(range(4), 2):
        assert {(row[i], row[j]) for row in rows} == {*product(columns[i], columns[j])}


def test_rows_of_some_are_extended_and_the_others_as_they_were():
    rows, marked = (list(in_turn("abc", [1, 2], times={"b": 2}, extended=some)) for some in ("", "bc"))
    assert [row.values for row in rows] == [row.values for row in marked]
    names = {(row.values[0], tuple(mark.name for mark in row.marks)) for row in marked}
    assert names == {("a", ()), ("a", ("slow",)), ("b", ("extended",)), ("c", ("extended",)), ("c", ("slow",))}


def test_each_pair_that_exists_is_there():
    rows = [
        param.values for param in in_turn("ab", range(3), "xy", exists=lambda a, n, c: n == 0 or (a, c) == ("a", "x"))
    ]
    assert {row[:2] for row in rows} == {("a", 0), ("a", 1), ("a", 2), ("b", 0)}
    assert {row[::2] for row in rows} == {*product("ab", "xy")}


@pytest.mark.parametrize("num_rows", [15, 20, 36])
def test_each_row_comes_once_and_every_pair_of_the_others(num_rows):
    rows = usual(in_turn(range(num_rows), "abcde", [1, 2, 3]))
    assert [row[0] for row in rows] == [*range(num_rows)]
    assert {row[1:] for row in rows} == {*product("abcde", [1, 2, 3])}


def test_no_value_is_tied_to_a_part_of_the_first():
    """Though the last part of the first and the other alternate alike."""
    rows = usual(in_turn(product("abcd", ["coupled", "rejection"]), [0.0, 1.0]))
    assert {row[1:] for row in rows} == {*product(["coupled", "rejection"], [0.0, 1.0])}


def test_a_row_may_come_beside_every_value_or_not_at_all():
    rows = usual(in_turn("abc", range(5), "xyz", times={"b": 5, "c": 0}))
    assert [row[0] for row in rows] == [*"abbbbb"]
    assert {row[1] for row in rows if row[0] == "b"} == {*range(5)}
    assert {row[2] for row in rows if row[0] == "b"} == {*"xyz"}


def test_slow_rows_are_only_there_where_they_may_be_selected(monkeypatch):
    rows = usual(in_turn("abc", [1, 2]))
    monkeypatch.setattr(matrices, "is_whole", False)
    assert [param.values for param in in_turn("abc", [1, 2])] == rows


def test_what_is_denied_is_no_test():
    matrix = list(in_turn("ab", [1, 2], exists=lambda letter, number: (letter, number) != ("a", 1)))
    assert [param.values for param in matrix] == [("a", 2), ("b", 1), ("b", 2)]
    assert ("a", 2) in usual(matrix)


def test_a_value_with_a_mark_never_comes_by_default():
    matrix = list(in_turn("abc", [1, pytest.param(2, marks=pytest.mark.slow)]))
    assert [param.values for param in matrix] == [*product("abc", [1, 2])]
    assert {row[1] for row in usual(matrix)} == {1}


def test_a_row_that_is_added_changes_no_other():
    assert usual(in_turn(range(9), "abc", "de")) == usual(in_turn(range(10), "abc", "de"))[:9]


def test_the_default_run_is_known_as_such():
    """A run of named files has their `extended` tests too where `-m` is what it is by default."""
    options = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["addopts"][options["addopts"].index("-m") + 1] == DEFAULT_MARKS
