"""msgpack records: a frozen dataclass to bytes and back.

A record travels as [tag, [field, field, ...]], nested dataclasses as lists, which are read back by their annotations.
Readers are built once per type, so a round costs microseconds. Knows nothing of what the records mean.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

import msgpack

Reader = Callable[[Any], Any]


class CodecError(ValueError):
    """Bytes that are not a record of this codec."""


class Codec:
    """Encodes and decodes the given record types; their order is the tag, so both ends must agree on it."""

    def __init__(self, record_types: tuple[type, ...]) -> None:
        self._types = record_types
        self._tags = {record_type: tag for tag, record_type in enumerate(record_types)}
        self._readers = [_reader(record_type) for record_type in record_types]

    def encode(self, record: Any) -> bytes:
        packed = msgpack.packb([self._tags[type(record)], record], default=_fields, use_bin_type=True)
        assert packed is not None
        return packed

    def decode(self, payload: bytes) -> Any:
        """Raises CodecError for anything but a whole record of a known type."""
        try:
            tag, fields = msgpack.unpackb(payload, use_list=False, strict_map_key=False)
            if tag < 0:
                raise IndexError(tag)
            return self._readers[tag](fields)
        except (ValueError, TypeError, IndexError, KeyError, msgpack.UnpackException) as error:
            raise CodecError(f"not a record: {error}") from error


_names: dict[type, tuple[str, ...]] = {}


def _fields(record: Any) -> list[Any]:
    record_type = type(record)
    if record_type not in _names:
        if not dataclasses.is_dataclass(record_type):
            raise TypeError(f"{record_type.__name__} cannot travel in a record")
        _names[record_type] = tuple(field.name for field in dataclasses.fields(record_type))
    return [getattr(record, name) for name in _names[record_type]]


def _reader(annotation: Any) -> Reader:
    """How to rebuild a value of this annotation from what msgpack gives, which has tuples for arrays."""
    if dataclasses.is_dataclass(annotation):
        hints, make = typing.get_type_hints(annotation), typing.cast(Callable[..., Any], annotation)
        readers = [_reader(hints[field.name]) for field in dataclasses.fields(annotation)]
        if all(read is _as_is for read in readers):
            return lambda fields: make(*fields)
        return lambda fields: make(*(read(value) for read, value in zip(readers, fields, strict=True)))
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (_reader(argument) for argument in arguments if argument is not type(None))
        return _as_is if inner is _as_is else lambda value: None if value is None else inner(value)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        inner = _reader(arguments[0])
        return _as_is if inner is _as_is else lambda values: tuple(inner(value) for value in values)
    return _as_is


def _as_is(value: Any) -> Any:
    return value
