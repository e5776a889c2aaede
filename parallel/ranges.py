"""The values that a field of a configuration record accepts, declared in the field's type and checked in one place.

`tp: Annotated[int, Range(1)] = 1` accepts 1 and above, and `check_ranges` refuses the rest in one line that names the
field. The options page and `--help KEY` print the same declarations. Standard library only; it must know no record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

LARGEST = 2**31 - 1
"""Upper bound of a range that names none: what every library below takes as a signed 32-bit number."""


def require(good: bool, key: str, value: object, remedy: str) -> None:
    """Raise ValueError "KEY=VALUE: REMEDY" unless `good`; `remedy` states what is wrong and what to do instead."""
    if not good:
        raise ValueError(f"{key}={value if value != '' else repr(value)}: {remedy}")


@contextmanager
def errors_of(subject: str, remedy: str = "") -> Iterator[None]:
    """Context whose ValueErrors begin with what they are about, "SUBJECT: ERROR", and end with a remedy if one is
    given."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{subject}: {error}" + f"; {remedy}" * bool(remedy)) from error


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included, or strictly between `above` and `below`; NaN is in no range.

    On a list it bounds every item. `zero` names what 0 stands for; 0 is then accepted even below `low`. `cap` is the
    technical limit where no `high` is given. `remedy` ends the error line with what to write instead. `filled`: a list
    must hold something.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    zero: str = ""
    cap: float = LARGEST
    remedy: str = ""
    filled: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether the number, or every number of the list, is in the range; None is left to the type of the field."""
        if isinstance(value, list | tuple):
            return all(map(self.accepts, value)) and (bool(value) or not self.filled)
        if value is None or (value == 0 and self.zero):
            return True
        lowest = -LARGEST if self.low is None else self.low
        highest = self.cap if self.high is None else self.high
        strictly = (self.above is None or value > self.above) and (self.below is None or value < self.below)
        return lowest <= value <= highest and strictly

    @property
    def words(self) -> str:
        """The range without its cap, as `0 (off) or above`."""
        if self.low == 0 and self.high is None and self.below is None:
            return f"0 ({self.zero}) or above" if self.zero else "0 or above"
        if self.low is not None and self.high is not None:
            words = f"between {self.low} and {self.high}"
        elif self.above is not None and self.below is not None:
            words = f"between {self.above} and {self.below}, both excluded"
        else:
            bounds = {"at least": self.low, "above": self.above, "below": self.below, "at most": self.high}
            words = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
        return f"0 ({self.zero}) or {words}" if self.zero else words

    def __str__(self) -> str:
        return f"{self.words}, at most {self.cap}" if self.cap < LARGEST else self.words

    def error(self, value: Any) -> str:
        """What is wrong with a value that is not accepted."""
        is_list = isinstance(value, list | tuple)
        if is_list and not value:
            return "must name at least one"
        too_large = self.high is None and any(item > self.cap for item in (value if is_list else [value]))
        words = f"at most {self.cap}" if too_large else f"{self.words}{self.remedy and f'; {self.remedy}'}"
        return f"must all be {words}" if is_list else f"must be {words}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of these words; on a list, every item, of which there is at least one if it must be `filled`."""

    words: tuple[str, ...]
    filled: bool = False

    def accepts(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(item in self.words for item in value) and (bool(value) or not self.filled)
        return value in self.words

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"

    def error(self, value: Any) -> str:
        if isinstance(value, list | tuple):
            return f"must {'all be among' if value else 'name some of'} {', '.join(self.words)}"
        return f"is unknown; choose {self}"


class Section:
    """Base of the records of the configuration: frozen dataclasses whose fields declare what they accept."""

    __slots__ = ()

    def check(self, where: str) -> None:
        """Raise ValueError, one line, for the first field whose value cannot be used; `where` prefixes its name."""
        check_ranges(self, where)
        self.check_fields(where)

    def check_fields(self, where: str) -> None:
        """The part of `check` that the range of a single field does not express."""


class Choice(Section):
    """Base of the records that a group of the command line chooses among by their `name`."""

    __slots__ = ()
    name: str

    def check(self, where: str) -> None:
        right = type(self)().name
        require(self.name == right, f"{where}.name", self.name, f"is set by {where}={right}; write {where}={self.name}")
        super().check(where)


def bound_of(record: type, name: str) -> Range | OneOf | None:
    """What field `name` of a record accepts; None: every value of its type."""
    return _bounds(record).get(name)


def check_ranges(record: object, where: str, *, except_for: str = "") -> None:
    """Raise ValueError, one line, for the first field that holds a value out of its range, but one field if named."""
    for name, bound in _bounds(type(record)).items():
        value = getattr(record, name)
        if name != except_for and not bound.accepts(value):
            require(False, f"{where}.{name}", value, bound.error(value))


@cache
def _bounds(record: type) -> Mapping[str, Range | OneOf]:
    hints = get_type_hints(record, include_extras=True)
    declared = {name: get_args(hint)[1:] for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {name: bound for name, extras in declared.items() for bound in extras if isinstance(bound, Range | OneOf)}
