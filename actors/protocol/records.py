"""Copies of records with other values in some fields, as `dataclasses.replace` makes them, for what happens in every
round: that one looks at each field of the class, by Python's own code, at every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

_Record = TypeVar("_Record")


def replace(record: _Record, **changes: Any) -> _Record:
    """The record with these values; its class has two fields or more."""
    read, places = _layout(type(record))
    values = [*read(record)]
    for name, value in changes.items():
        values[places[name]] = value
    return type(record)(*values)


@cache
def _layout(kind: type[Any]) -> tuple[Callable[[Any], tuple[Any, ...]], dict[str, int]]:
    """What reads all fields in the order of the arguments, and the place of each."""
    names = [field.name for field in fields(kind)]
    return attrgetter(*names), {name: place for place, name in enumerate(names)}
