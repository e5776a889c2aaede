"""Parameters of tests that are a matrix: all of it under `-m slow`, and by default enough to touch every value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest


def in_turn(first: Iterable[Any], *others: Iterable[Any]) -> Iterator[Any]:
    """Each of `first` with all combinations of the others; by default with one value of each, the next in turn.

    A value that is a tuple is several parameters.
    """
    columns = [list(other) for other in others]
    for i, one in enumerate(first):
        turns = tuple((i + i // len(column)) % len(column) for column in columns)  # in step with no period of `first`
        for places in product(*(range(len(column)) for column in columns)):
            chosen = [one, *(column[place] for column, place in zip(columns, places, strict=True))]
            values = [part for value in chosen for part in (value if isinstance(value, tuple) else (value,))]
            yield pytest.param(*values, marks=[] if places == turns else pytest.mark.slow)
