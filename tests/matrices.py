"""Parameters of tests that are a matrix: under `-m slow` every pair of values, and by default a covering selection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import combinations, product
from typing import Any

import pytest

_MARKED = type(pytest.param())

is_whole = False
"""Whether rows that are `slow` are there at all; `tests/conftest.py` sets it where the run may select them."""


def in_turn(
    first: Iterable[Any],
    *others: Iterable[Any],
    times: Mapping[Any, int] | None = None,
    exists: Callable[..., object] = lambda *values: True,
    extended: Container[Any] = (),
) -> Iterator[Any]:
    """Each of `first` beside every value of the others; by default with one combination of them.

    That is the combination whose values were chosen least often beside this one and, of equals, beside one another. So
    every value comes, and every pair of values of the others as long as there are rows for it. `times` names those of
    `first` that come more often, each time beside other values, or with 0 not at all, because another row or test runs
    the same code; the rows of those in `extended` are marked so. A value that is a tuple is several parameters; one of
    the others that is a `pytest.param` with marks never comes by default. A combination for which
    `exists(*parameters)` is false is left out altogether.

    The rows beside these are `slow`. They are chosen in the same way, until each of `first` has come beside every value
    of the others: all combinations of two columns, but not of more. What depends on three values belongs into `first`.
    """
    firsts, columns, seen = [*first], [list(other) for other in others], Counter[Any]()
    usual = [[value for value in column if not isinstance(value, _MARKED)] for column in columns]
    every = [[value.values[0] if isinstance(value, _MARKED) else value for value in column] for column in columns]

    def rows_of(one: Any, columns: list[list[Any]]) -> list[tuple[Any, ...]]:
        return [row for row in product([one], *columns) if exists(*_flat(row))]

    def cost(row: tuple[Any, ...]) -> tuple[int, ...]:
        """How often pairs with a value of `first`, pairs of the others, and single values were chosen."""
        own, beside = _cells(0, row[0]), [cell for i, one in enumerate(row[1:], 1) for cell in _cells(i, one)]
        return tuple(sum(seen[one] for one in some) for some in (product(own, beside), combinations(beside, 2), beside))

    def choose(rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        row = min(rows, key=cost)
        cells = [cell for i, value in enumerate(row) for cell in _cells(i, value)]
        seen.update([*cells, *combinations(cells, 2)])
        return row

    chosen: list[list[tuple[Any, ...]]] = []
    for one in firsts:
        rows, some = rows_of(one, usual), list[tuple[Any, ...]]()
        for _ in range(min(times.get(one, 1) if times else 1, len(rows))):
            some.append(choose([row for row in rows if row not in some]))
        chosen.append(some)
    for one, some in zip(firsts, chosen, strict=True):
        slow, rows = list[tuple[Any, ...]](), rows_of(one, every) if is_whole else []
        left = {value for row in rows for value in _values(row)}.difference(*map(_values, some))
        while left:
            slow.append(choose([row for row in rows if left & _values(row)]))
            left -= _values(slow[-1])
        for row in [*some, *slow]:
            usual_marks = [pytest.mark.extended] if one in extended else []
            yield pytest.param(*_flat(row), marks=pytest.mark.slow if row in slow else usual_marks)


def _values(row: tuple[Any, ...]) -> set[tuple[int, str]]:
    return {(column, repr(value)) for column, value in enumerate(row)}


def _flat(row: tuple[Any, ...]) -> list[Any]:
    return [part for value in row for part in (value if isinstance(value, tuple) else (value,))]


def _cells(column: int, value: Any) -> list[tuple[int, int, str]]:
    """Column, place and text of each parameter of a value."""
    return [(column, place, repr(part)) for place, part in enumerate(_flat((value,)))]
