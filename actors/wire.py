"""The control line: msgpack records over ZeroMQ between the coordinator and every rank and client.

One bound socket at the coordinator (`Hub`), one connected socket at everyone else (`Link`). Four one-way records make
a round; a role's records are sent to each of its ranks, so no rank waits for its lead to pass them on. The same code
runs between threads (inproc://), processes and hosts (tcp://). Carries no tensors and decides nothing. That a record
was lost on the way is for others to notice (`muster.py`).
"""

from __future__ import annotations

import contextlib
import time
import zlib
from math import ceil
from typing import Any

import zmq

from actors import lifecycle, messages
from parallel.codec import Codec, CodecError

CODEC = Codec(
    (
        messages.Request,
        messages.Abort,
        messages.Tokens,
        messages.DraftBatch,
        messages.ProposalBatch,
        messages.OutlookBatch,
        messages.VerifyBatch,
        messages.VerdictBatch,
        lifecycle.Alive,
        lifecycle.Recall,
        lifecycle.Join,
        lifecycle.RankLost,
        lifecycle.Silent,
        lifecycle.Hello,
        lifecycle.Ready,
        messages.ReportOrder,
        messages.Report,
        lifecycle.Stop,
        lifecycle.RoleLost,
        lifecycle.RoleBack,
    )
)
LINGER_MS = 200
"""How long a closing socket may still deliver: long enough for a last word, too short to hang an exit."""
RECONNECT_MS = 20
"""How soon a link looks for a hub that went away, and again and again: a successor listens at the same address."""


def link_name(identity: str, incarnation: int) -> str:
    """Under which a hub knows a link: no two processes that play one part, one after the other, share a name."""
    return f"{identity}#{incarnation}"


def pack(record: Any) -> bytes:
    """A record and its checksum: a torn one must not pass for another."""
    payload = CODEC.encode(record)
    return payload + zlib.crc32(payload).to_bytes(4, "big")


def unpack(packed: bytes) -> Any:
    """CodecError for anything but a whole record."""
    payload, checksum = packed[:-4], packed[-4:]
    if zlib.crc32(payload).to_bytes(4, "big") != checksum:
        raise CodecError("the checksum does not match")
    return CODEC.decode(payload)


def _open(kind: int) -> zmq.Socket:
    """Queues have no end: ZeroMQ's default of 1000 records would drop what a slow reader has not taken yet."""
    socket = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    return socket


class Hub:
    """The coordinator's end. `address` is inproc://name or tcp://host:port, port 0 or * for any free one."""

    def __init__(self, address: str) -> None:
        self._socket = _open(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ValueError(f"cannot listen on {address}: {error}; choose a free port") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_unreadable = 0

    def send(self, identities: tuple[str, ...] | list[str], record: Any) -> None:
        """Multicast one record; it is encoded once."""
        payload = pack(record)
        for identity in identities:
            self._socket.send_multipart((identity.encode(), payload))

    def receive(self, timeout_s: float | None = None) -> tuple[str, Any] | None:
        """The next (identity, record), or None after `timeout_s`. Unreadable bytes are counted and skipped."""
        while timeout_s is None or self._socket.poll(int(timeout_s * 1000)):
            identity, *payload = self._socket.recv_multipart()
            try:
                return identity.decode(), unpack(b"".join(payload))
            except (CodecError, UnicodeDecodeError):  # whoever finds the port may send anything, under any name
                self.num_unreadable += 1
        return None

    def close(self) -> None:
        self._socket.close()


def open_hub(address: str, patience_s: float) -> Hub:
    """A hub at an address that may still be taken for so long."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return Hub(address)
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class Link:
    """The end of a rank or a client, known to the hub as `identity`. Use from one thread.

    A hub that died is reconnected to; what was sent meanwhile arrives then, all of it or, if it `keeps` the "newest",
    only the last record.
    """

    def __init__(self, address: str, identity: str, *, keeps: str = "all") -> None:
        self.identity = identity
        self.num_unreadable = 0
        self._socket = _open(zmq.DEALER)
        self._socket.setsockopt_string(zmq.IDENTITY, identity)
        if keeps == "newest":
            self._socket.setsockopt(zmq.CONFLATE, 1)
        self._socket.connect(address)

    def send(self, record: Any) -> None:
        """Never blocks: with nobody at the other end any more the record is lost, like any other message."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(pack(record), zmq.NOBLOCK)

    def receive(self, timeout_s: float | None = None) -> Any | None:
        """The next record, or None after `timeout_s` in whole milliseconds. Unreadable bytes are counted, skipped."""
        while timeout_s is None or self._socket.poll(ceil(timeout_s * 1000)):
            try:
                return unpack(self._socket.recv())
            except CodecError:
                self.num_unreadable += 1
        return None

    def close(self) -> None:
        self._socket.close()
