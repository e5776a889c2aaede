"""The control line: msgpack records over TCP between the coordinator and every rank and client.

One listening end at the coordinator (`Hub`), one connecting end at everyone else (`Link`). Four one-way records make a
round; a role's records are sent to each of its ranks, so no rank waits for its lead to pass them on. Each end is worked
from the thread that owns it, within its calls: a thread of the line's own would take cores from those that compute, and
wake up first. The same code runs between threads, processes and hosts. Carries no tensors and decides nothing. That a
record was lost on the way is for others to notice (`membership.py`).
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from typing import Any

from actors.protocol import membership, messages
from actors.transport.codec import Codec, CodecError
from actors.transport.framing import (
    LONGEST_FRAME,
    ConnectionOver,
    Garbled,
    Poller,
    Stream,
    accept,
    address_of,
    connect,
    framed,
    listen,
    place_of,
)

CODEC = Codec(
    (
        messages.Request,
        messages.Abort,
        messages.Tokens,
        messages.DraftBatch,
        messages.ProposalBatch,
        messages.DraftPreviewBatch,
        messages.VerifyBatch,
        messages.VerdictBatch,
        membership.Alive,
        membership.Recall,
        membership.Join,
        membership.RankLost,
        membership.Silent,
        membership.Hello,
        membership.Ready,
        messages.ReportOrder,
        messages.Report,
        membership.Stop,
        membership.RoleLost,
        membership.RoleBack,
    )
)
LINGER_S = 0.2
"""How long a closing end may still deliver: long enough for a last word, too short to hang an exit."""
RECONNECT_S = 0.02
"""How soon a link looks for a hub that went away, and again and again: a successor listens at the same address."""
CONNECT_S = 1.0
"""After which an attempt that nobody answers is made anew: TCP itself would ask ever less often."""
LINK_GIVE_UP_S = 3
"""A hub's host unheard of for so long is cut off, or gone: connect anew. TCP has sent it everything four times more."""
HUB_GIVE_UP_S = 60
"""Longer, since a rank in a long pass reads nothing meanwhile; a link that was cut off comes back by itself."""
GREETING = b"specdec 1 "
"""Begins a link's first frame; its identity is the rest."""
_LONGEST_GREETING = 512
_MOST_STRANGERS = 256
"""Connections that have not greeted yet; the oldest makes room for another."""


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


class Hub:
    """The coordinator's end. `address` is tcp://host:port, port 0 or * for any free one. Use from one thread."""

    def __init__(self, address: str) -> None:
        try:
            self._listener = listen(address, HUB_GIVE_UP_S)
        except OSError as error:
            raise ValueError(f"cannot listen on {address}: {error.strerror}; choose a free port") from error
        self.address = address_of(self._listener)
        self.num_unreadable = 0
        self._poller = Poller()
        self._poller.watch(self._listener.fileno())
        self._streams: dict[int, Stream] = {}
        self._strangers: dict[Stream, None] = {}
        self._identity_of: dict[Stream, str] = {}
        self._stream_to: dict[str, Stream] = {}
        self._inbox: deque[tuple[str, bytes]] = deque()

    def identities(self) -> list[str]:
        """Of the links that are connected now."""
        return list(self._stream_to)

    def send(self, identities: tuple[str, ...] | list[str], record: Any) -> None:
        """Multicast one record; it is encoded once. Never blocks; for whom nobody is known here, it is lost."""
        self._post(identities, pack(record))

    def receive(self, timeout_s: float | None = None) -> tuple[str, Any] | None:
        """The next (identity, record), or None after `timeout_s`. Unreadable bytes are counted and skipped."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._inbox:
                identity, packed = self._inbox.popleft()
                try:
                    return identity, unpack(packed)
                except CodecError:  # whoever finds the port may send anything
                    self.num_unreadable += 1
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._turn(left_s)
            if not self._inbox and left_s == 0:
                return None

    def close(self) -> None:
        deadline = time.monotonic() + LINGER_S
        while any(stream.is_waiting for stream in self._stream_to.values()):
            if (left_s := deadline - time.monotonic()) <= 0:
                break
            self._turn(left_s)
        for stream in self._streams.values():
            stream.close()
        self._listener.close()
        self._poller.close()

    def _post(self, identities: tuple[str, ...] | list[str], packed: bytes) -> None:
        frame = framed(packed)
        for identity in identities:
            if (stream := self._stream_to.get(identity)) is not None:
                stream.send(frame)
                self._poller.watch(stream.fileno(), writable=stream.is_waiting)

    def _turn(self, timeout_s: float | None) -> None:
        """Wait until there is something to do, and do it."""
        for descriptor in self._poller.wait(timeout_s):
            if descriptor == self._listener.fileno():
                while (stream := accept(self._listener, _LONGEST_GREETING)) is not None:
                    self._admit(stream)
            elif (stream := self._streams.get(descriptor)) is not None:
                if stream.is_waiting:
                    stream.flush()
                    self._poller.watch(descriptor, writable=stream.is_waiting)
                self._hear(stream)

    def _admit(self, stream: Stream) -> None:
        if len(self._strangers) >= _MOST_STRANGERS:
            self.num_unreadable += 1
            self._drop(next(iter(self._strangers)))
        self._streams[stream.fileno()] = stream
        self._strangers[stream] = None
        self._poller.watch(stream.fileno())
        self._hear(stream)  # who connects greets at once

    def _hear(self, stream: Stream) -> None:
        try:
            if not stream.fill():
                return
            for frame in stream.frames():
                if stream in self._strangers:
                    self._greet(stream, frame)
                else:
                    self._inbox.append((self._identity_of[stream], frame))
        except Garbled:
            self.num_unreadable += 1
            self._drop(stream)
        except ConnectionOver:
            self._drop(stream)

    def _greet(self, stream: Stream, frame: bytes) -> None:
        """From now on it is the one who is sent to. A predecessor is still heard; it would come back if it were closed,
        and take the name again."""
        if not frame.startswith(GREETING):
            raise Garbled
        try:
            identity = frame.removeprefix(GREETING).decode()
        except UnicodeDecodeError as error:
            raise Garbled from error
        del self._strangers[stream]
        stream.longest = LONGEST_FRAME
        self._identity_of[stream] = identity
        self._stream_to[identity] = stream

    def _drop(self, stream: Stream) -> None:
        self._poller.forget(stream.fileno())
        del self._streams[stream.fileno()]
        self._strangers.pop(stream, None)
        identity = self._identity_of.pop(stream, None)
        if self._stream_to.get(identity) is stream:
            del self._stream_to[identity]
        stream.close()


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

    A hub that died, or is not there yet, is connected to as soon as it is; what was sent meanwhile arrives then, all of
    it or, if it `keeps` the "newest", only the last record.
    """

    def __init__(self, address: str, identity: str, *, keeps: str = "all") -> None:
        self.identity = identity
        self.num_unreadable = 0
        self._place = place_of(address)
        self._greeting = framed(GREETING + identity.encode())
        self._keeps = keeps
        self._outgoing: deque[bytes] = deque()
        self._inbox: deque[bytes] = deque()
        self._poller = Poller()
        self._stream: Stream | None = None
        self._act_at = 0.0  # when to connect, or to give up an attempt
        self._connect()

    @property
    def is_waiting(self) -> bool:
        """Something sent has not gone out yet: `receive` and the next `send` go on with it."""
        return bool(self._outgoing)

    def send(self, record: Any) -> None:
        """Never blocks. What was on its way to a hub that died is lost, like any other message."""
        self._post(pack(record))

    def receive(self, timeout_s: float | None = None) -> Any | None:
        """The next record, or None after `timeout_s`. Unreadable bytes are counted, skipped."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._inbox:
                try:
                    return unpack(self._inbox.popleft())
                except CodecError:
                    self.num_unreadable += 1
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._turn(left_s)
            if not self._inbox and left_s == 0:
                return None

    def close(self) -> None:
        deadline = time.monotonic() + LINGER_S
        while self._outgoing and (left_s := deadline - time.monotonic()) > 0:
            self._turn(left_s)
        if self._stream is not None:
            self._stream.close()
        self._poller.close()

    def _post(self, packed: bytes) -> None:
        self._attend()  # a hub that went away is noticed before it is given a record
        if self._keeps == "newest":
            begun = 1 if self._stream is not None and self._stream.num_begun else 0
            while len(self._outgoing) > begun:
                self._outgoing.pop()
        self._outgoing.append(framed(packed))
        self._flush()

    def _turn(self, timeout_s: float | None) -> None:
        """Wait until there is something to do, and do it."""
        if self._stream is None or self._stream.preface:
            until_s = max(0.0, self._act_at - time.monotonic())
            timeout_s = until_s if timeout_s is None else min(timeout_s, until_s)
        if timeout_s != 0:
            self._poller.wait(timeout_s)
        self._attend()

    def _attend(self) -> None:
        """Take in what has come, send what waits, and be connected or on the way to be."""
        if self._stream is None:
            if time.monotonic() >= self._act_at:
                self._connect()
            return
        if self._stream.is_waiting:
            self._flush()
        try:
            while self._stream.fill():
                self._inbox.extend(self._stream.frames())
        except Garbled:
            self.num_unreadable += 1
            self._lose()
        except ConnectionOver:
            self._lose()
        else:
            if self._stream.preface and time.monotonic() >= self._act_at:
                self._lose()

    def _connect(self) -> None:
        connection = connect(self._place, LINK_GIVE_UP_S)
        self._act_at = time.monotonic() + (RECONNECT_S if connection is None else CONNECT_S)
        if connection is not None:
            self._stream = Stream(connection, self._outgoing, preface=self._greeting)
            self._flush()

    def _flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
            self._poller.watch(self._stream.fileno(), writable=self._stream.is_waiting)

    def _lose(self) -> None:
        self._poller.forget(self._stream.fileno())
        self._stream.close()
        self._stream = None
        self._act_at = time.monotonic() + RECONNECT_S
