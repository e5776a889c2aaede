"""Records to bytes and back: a frozen dataclass as msgpack behind one byte that names its type.

msgpack carries a record, msgspec checks it against the annotations of its type: a value of another type, a boolean
where an integer belongs or a missing field is refused while it is read. Knows nothing of what the records mean.
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

    def encode(self, record: Any) -> bytes:
        payload = msgpack.Packer().pack(msgspec.to_builtins(record, builtin_types=(bytes,)))
        return self._tags[type(record)] + payload

    def decode(self, payload: bytes | memoryview) -> Any:
        """Raises CodecError for anything but a whole record of a known type."""
        try:
            fields = msgpack.unpackb(memoryview(payload)[1:])
            return msgspec.convert(fields, self.record_types[payload[0]])
        except (
            msgspec.ValidationError,
            msgpack.UnpackException,
            ValueError,
            IndexError,
            TypeError,
            RecursionError,
            MemoryError,
        ) as error:
            raise CodecError(f"not a record: {error}") from error
