"""Parameters of tests that are a matrix: all of it under `-m slow`, and by default a covering selection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
) -> Iterator[Any]:
    """Each of `first` with all combinations of the others; by default with one of them.

    That is the combination whose values were chosen least often beside this one and, of equals, beside one another. So
    every value comes, and every pair of values of the others as long as there are rows for it. `times` names those of
    `first` that come more often, each time beside other values, or with 0 not at all, because another row or test runs
    the same code. A value that is a tuple is several parameters; one of the others that is a `pytest.param` with marks
    never comes by default. A combination for which `exists(*parameters)` is false is left out altogether.
    """
    seen, columns = Counter[Any](), [list(other) for other in others]
    usual = [[value for value in column if not isinstance(value, _MARKED)] for column in columns]
    every = [[value.values[0] if isinstance(value, _MARKED) else value for value in column] for column in columns]

    def cost(row: tuple[Any, ...]) -> tuple[int, ...]:
        """How often pairs with a value of `first`, pairs of the others, and single values were chosen."""
        own, beside = _cells(0, row[0]), [cell for i, one in enumerate(row[1:], 1) for cell in _cells(i, one)]
        return tuple(sum(seen[one] for one in some) for some in (product(own, beside), combinations(beside, 2), beside))

    for one in first:
        rows, left = ([row for row in product([one], *of) if exists(*_flat(row))] for of in (every, usual))
        chosen: list[tuple[Any, ...]] = []
        for _ in range(min(times.get(one, 1) if times else 1, len(left))):
            chosen.append(min((row for row in left if row not in chosen), key=cost))
            cells = [cell for i, value in enumerate(chosen[-1]) for cell in _cells(i, value)]
            seen.update([*cells, *combinations(cells, 2)])
        for row in rows if is_whole else [row for row in rows if row in chosen]:
            yield pytest.param(*_flat(row), marks=[] if row in chosen else pytest.mark.slow)


def _flat(row: tuple[Any, ...]) -> list[Any]:
    return [part for value in row for part in (value if isinstance(value, tuple) else (value,))]


def _cells(column: int, value: Any) -> list[tuple[int, int, str]]:
    """Column, place and text of each parameter of a value."""
    return [(column, place, repr(part)) for place, part in enumerate(_flat((value,)))]
