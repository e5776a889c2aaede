"""Records to bytes and back: a frozen dataclass as msgpack behind one byte that names its type.

The msgpack package writes; msgspec reads, and checks a record against the annotations of its type meanwhile: a value of
another type, a boolean where an integer belongs or a missing field is refused. Knows nothing of what the records mean.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgpack
import msgspec

from parallel.typed_json import prepare


class CodecError(ValueError):
    """Bytes that are not a record of this codec."""


class Codec:
    """Encodes and decodes the given record types; their order is the tag, so both ends must agree on it.

    Those that are `named`, as "module:type", are loaded at their first use.
    """

    def __init__(self, record_types: tuple[type, ...], named: tuple[str, ...] = ()) -> None:
        self._names = {len(record_types) + i: name for i, name in enumerate(named)}
        self._tags: dict[type, bytes] = {}
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {}
        for tag, record_type in enumerate(record_types):
            self._add(tag, record_type)

    @property
    def record_types(self) -> tuple[type, ...]:
        for tag in self._names:
            self._decoder(tag)
        return tuple(sorted(self._tags, key=self._tags.__getitem__))

    def _add(self, tag: int, record_type: type) -> msgspec.msgpack.Decoder[Any]:
        prepare(record_type)
        self._tags[record_type] = bytes([tag])
        decoder = self._decoders[tag] = msgspec.msgpack.Decoder(record_type)
        return decoder

    def _decoder(self, tag: int) -> msgspec.msgpack.Decoder[Any]:
        if (decoder := self._decoders.get(tag)) is None:
            if tag not in self._names:
                raise IndexError(f"its tag is {tag}")
            module, _, name = self._names[tag].partition(":")
            decoder = self._add(tag, getattr(import_module(module), name))
        return decoder

    def encode(self, record: Any) -> bytes:
        if type(record) not in self._tags:
            self._decoder(next(tag for tag, name in self._names.items() if name == _name_of(type(record))))
        fields = msgspec.to_builtins(record, builtin_types=(bytes,))
        return self._tags[type(record)] + msgpack.Packer().pack(fields)

    def decode(self, payload: bytes | memoryview) -> Any:
        """Raises CodecError for anything but a whole record of a known type."""
        try:
            return self._decoder(payload[0]).decode(memoryview(payload)[1:])
        except (msgspec.MsgspecError, ValueError, IndexError, TypeError, RecursionError, MemoryError) as error:
            raise CodecError(f"not a record: {error}") from error


def _name_of(record_type: type) -> str:
    return f"{record_type.__module__}:{record_type.__name__}"
