"""What fields of records stand for where nothing is said, read off the records of a module."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from inspect import get_annotations


def defaults_that_say_something(module: str) -> dict[str, float]:
    """`RECORD.FIELD` -> its default, of the public records that the module declares: numbers but 0, and True."""
    found = {}
    for record in vars(import_module(module)).values():
        is_record = isinstance(record, type) and is_dataclass(record) and record.__module__ == module
        if is_record and not record.__name__.startswith("_"):
            for one in fields(record):
                is_own = one.name in get_annotations(record) and not one.name.startswith("_")
                if (
                    is_own
                    and one.default is not MISSING
                    and isinstance(one.default, bool | int | float)
                    and one.default
                ):
                    found[f"{record.__name__}.{one.name}"] = one.default
    return found
