"""Records to bytes and back: a frozen dataclass as msgpack behind one byte that names its type.

The msgpack package writes; msgspec reads, and checks a record against the annotations of its type meanwhile: a value of
another type, a boolean where an integer belongs or a missing field is refused. Knows nothing of what the records mean.
"""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec

from parallel.typed_json import prepare


class CodecError(ValueError):
    """Bytes that are not a record of this codec."""


class Codec:
    """Encodes and decodes the given record types; their order is the tag, so both ends must agree on it."""

    def __init__(self, record_types: tuple[type, ...]) -> None:
        self.record_types = record_types
        self._tags = {record_type: bytes([tag]) for tag, record_type in enumerate(record_types)}
        for record_type in record_types:
            prepare(record_type)
        self._decoders = [msgspec.msgpack.Decoder(record_type) for record_type in record_types]

    def encode(self, record: Any) -> bytes:
        fields = msgspec.to_builtins(record, builtin_types=(bytes,))
        return self._tags[type(record)] + msgpack.Packer().pack(fields)

    def decode(self, payload: bytes | memoryview) -> Any:
        """Raises CodecError for anything but a whole record of a known type."""
        try:
            return self._decoders[payload[0]].decode(memoryview(payload)[1:])
        except (msgspec.MsgspecError, ValueError, IndexError, TypeError, RecursionError, MemoryError) as error:
            raise CodecError(f"not a record: {error}") from error
