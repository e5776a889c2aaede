"""What all records of a body have in common: strict types, no field that is unknown, null for a field that is absent.

It must not know any field.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

_MOST_FIELDS = 256
"""Fields of one record, known or not: each unknown one would be an error of its own."""


class BodyPart(BaseModel):
    """A record of a body."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not supported, with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, record: Any) -> Any:
        if not isinstance(record, dict):
            return record
        if len(record) > _MOST_FIELDS:
            raise ValueError(f"has {len(record)} fields; give at most {_MOST_FIELDS}")
        return {name: value for name, value in record.items() if value is not None and not cls._is_neutral(name, value)}

    @classmethod
    def _is_neutral(cls, name: str, value: object) -> bool:
        """Whether a field that is not supported asks for nothing."""
        meaningless = () if name in cls.model_fields else cls.neutral.get(name, ())
        return any(type(value) is type(one) and value == one for one in meaningless)


def at_most(most: int) -> BeforeValidator:
    """Refuses lists and objects of more entries before any of them is looked at."""
    return BeforeValidator(_bound(most))


def _bound(most: int) -> Callable[[Any], Any]:
    def check(entries: Any) -> Any:
        if isinstance(entries, Sized) and not isinstance(entries, str) and len(entries) > most:
            raise ValueError(f"has {len(entries)} entries; give at most {most}")
        return entries

    return check
