"""Records to bytes and back: a frozen dataclass as msgpack behind one byte that names its type.

The msgpack package writes; msgspec reads, and checks a record against the annotations of its type meanwhile: a value of
another type, a boolean where an integer belongs or a missing field is refused. Says which records the control line has,
and what becomes of bytes that are none of them; must not know what they mean.
"""

from __future__ import annotations

import logging
import time
from importlib import import_module
from typing import Any

import msgpack
import msgspec

from actors.logs import log_event, logger_of
from actors.protocol import membership, messages
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


# --- the control line -------------------------------------------------------------------------------------------------

_REQUESTS = (messages.Request, messages.Abort, messages.Outputs, messages.ReportOrder, messages.Report)
_DRAFTS = (messages.DraftBatch, messages.ProposalBatch, messages.DraftPreviewBatch)
_VERDICTS = (messages.VerifyBatch, messages.VerdictBatch)
_PROCESSES = (membership.Alive, membership.RankLost, membership.Silent, membership.Hello, membership.Stop)
_FAILURES = (membership.PassFailed,)
_EPOCHS = (membership.Recall, membership.Join, membership.Ready, membership.RoleLost, membership.RoleBack)
_BRIDGES = (membership.Bridge,)
_KEYS = (membership.ClientKeys,)
_WEIGHTS = (messages.UpdateWeights, messages.WeightsUpdated)
_LEASES = tuple(f"actors.protocol.leases:{name}" for name in ("LeaseOrder", "LeaseQuery", "LeaseAnswer"))
CODEC = Codec(
    _REQUESTS + _DRAFTS + _VERDICTS + _PROCESSES + _EPOCHS + _BRIDGES + _FAILURES + _KEYS + _WEIGHTS,
    _LEASES,
)
LONGEST_TO_HUB = 1 << 24
"""Bytes of a record. Proposals with distributions for a large batch have about a third of it."""
LONGEST_TO_LINK = 1 << 28
"""A report with as many spans as are kept has a few millions."""
MOST_QUEUED = 20_000
"""Records that wait for a peer that does not read; further ones are lost, as for a peer that is gone."""
LINGER_MS = 200
"""How long `close` may still deliver: enough for a last record, too short to delay an exit."""
RECONNECT_MS = 20
"""Time between two attempts of a link to reach a hub that is gone: its successor listens at the same address."""
SELECT_BELOW_S = 0.01
"""Polls, ZeroMQ's too, count milliseconds; below this timeout that is too coarse, so `select` waits."""
FD_SETSIZE = 1024
"""`select` cannot watch descriptors from this number on."""
_WARN_EVERY_S = 5.0


class Reader:
    """An end of a connection, which counts what it could not read."""

    def __init__(self) -> None:
        self.num_unreadable = 0
        self._warned_at = -_WARN_EVERY_S

    def refuse(self, sender: str, error: Exception) -> None:
        """Count a record that was dropped, and log it unless one was logged just now."""
        self.num_unreadable += 1
        if time.monotonic() - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = time.monotonic()
            facts = {"sender": sender, "so_far": self.num_unreadable, "why": str(error)}
            log_event(logger_of("transport"), "refused", level=logging.WARNING, **facts)
