"""What a declared range accepts, how it is worded, and that a record is checked by its fields and as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import pytest

from parallel.ranges import LARGEST, OneOf, Range, Section, bound_of, require


@pytest.mark.parametrize(
    ("bound", "accepted", "refused", "words"),
    [
        (Range(0), (0, LARGEST), (-1, LARGEST + 1, float("nan")), "0 or above"),
        (Range(0, zero="off"), (0, 7), (-1,), "0 (off) or above"),
        (Range(2, zero="off"), (0, 2), (1, -2), "0 (off) or at least 2"),
        (Range(1, 5), (1, 5, [1, 5], None), (0, 6, [1, 6]), "between 1 and 5"),
        (Range(above=0, below=1), (0.5,), (0, 1), "between 0 and 1, both excluded"),
        (Range(above=0, high=1), (1, 0.1), (0, 1.1), "above 0 and at most 1"),
        (Range(1, cap=8), (1, 8), (0, 9), "at least 1, at most 8"),
        (Range(high=3), (3, -LARGEST), (4, -LARGEST - 1), "at most 3"),
        (OneOf(("a", "b")), ("a", ["a", "b"]), ("c", ["a", "c"]), "one of a, b"),
    ],
)
def test_a_range_accepts_what_its_words_say(bound, accepted, refused, words):
    assert str(bound) == words
    assert all(map(bound.accepts, accepted)) and not any(map(bound.accepts, refused))


@dataclass(frozen=True)
class Pair(Section):
    low: Annotated[int, Range(0, cap=9, remedy="take less")] = 1
    high: Annotated[list[int], Range(1)] = ()
    free: int = -5

    def check_fields(self, where):
        require(self.low != 3, f"{where}.low", self.low, "is unlucky")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, None),
        ({"low": -1}, "x.low=-1: must be 0 or above; take less"),
        ({"low": 10}, "x.low=10: must be at most 9"),
        ({"high": [1, 0]}, "x.high=[1, 0]: must all be at least 1"),
        ({"high": [LARGEST + 1]}, f"x.high=[{LARGEST + 1}]: must all be at most {LARGEST}"),
        ({"low": 3}, "x.low=3: is unlucky"),
        ({"low": 3, "high": [0]}, "x.high=[0]: must all be at least 1"),
    ],
)
def test_a_record_is_refused_in_one_line(changes, line):
    record = replace(Pair(), **changes)
    if line is None:
        record.check("x")
    else:
        with pytest.raises(ValueError) as refused:
            record.check("x")
        assert str(refused.value) == line
    assert bound_of(Pair, "free") is None and bound_of(Pair, "low").cap == 9
