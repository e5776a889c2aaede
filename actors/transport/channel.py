"""The control line: msgpack records over TCP between the coordinator and every rank and client.

The coordinator listens with a `Hub`; every rank and client connects with a `Link`. Four one-way records make a round; a
role's records are sent to each of its ranks, so no rank waits for its lead to pass them on. Sockets are served only
inside the calls of the thread that owns the end: a thread of its own would take a core from those that compute. The
same code connects threads, processes and hosts. Carries no tensors and decides nothing; lost records are detected
elsewhere (`actors/coordinator/membership.py`).
"""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from actors.protocol import membership, messages
from actors.transport import framing
from actors.transport.codec import Codec, CodecError
from actors.transport.framing import ConnectionClosed, MalformedFrame, Poller, Stream, framed

_REQUESTS = (messages.Request, messages.Abort, messages.Tokens, messages.ReportOrder, messages.Report)
_DRAFTS = (messages.DraftBatch, messages.ProposalBatch, messages.DraftPreviewBatch)
_VERDICTS = (messages.VerifyBatch, messages.VerdictBatch)
_PROCESSES = (membership.Alive, membership.RankLost, membership.Silent, membership.Hello, membership.Stop)
_EPOCHS = (membership.Recall, membership.Join, membership.Ready, membership.RoleLost, membership.RoleBack)
CODEC = Codec(_REQUESTS + _DRAFTS + _VERDICTS + _PROCESSES + _EPOCHS)
LINGER_S = 0.2
"""How long `close` may still deliver: enough for a last record, too short to delay an exit."""
RECONNECT_S = 0.02
"""Between two attempts of a link to reach a hub that is gone: its successor listens at the same address."""
CONNECT_S = 1.0
"""An unanswered attempt is replaced after so long: TCP itself would retry at growing intervals."""
LINK_GIVE_UP_S = 3
"""A link whose hub has acknowledged nothing for so long connects anew; TCP has repeated it four times by then."""
HUB_GIVE_UP_S = 60
"""Longer, because a rank in a long pass reads nothing; a link that was cut off reconnects by itself."""
GREETING = b"specdec 1 "
"""Begins a link's first frame; its identity is the rest."""
_LONGEST_GREETING = 512
_MAX_UNNAMED = 256
"""Connections without a greeting; the oldest is closed for another."""


def link_name(identity: str, incarnation: int) -> str:
    """The name of a process's link: successive processes of one rank have different ones."""
    return f"{identity}#{incarnation}"


def pack(record: Any) -> bytes:
    """A record and its checksum: a corrupted one must not pass for another."""
    payload = CODEC.encode(record)
    return payload + zlib.crc32(payload).to_bytes(4, "big")


def unpack(packed: bytes) -> Any:
    """Raises CodecError for anything but a whole record."""
    payload, checksum = packed[:-4], packed[-4:]
    if zlib.crc32(payload).to_bytes(4, "big") != checksum:
        raise CodecError("the checksum does not match")
    return CODEC.decode(payload)


class _Endpoint(ABC):
    """What both ends share: frames wait in an inbox, and sockets are served while `receive` or `close` waits."""

    def __init__(self) -> None:
        self.num_unreadable = 0
        self._poller = Poller()
        self._inbox: deque[tuple[str, bytes]] = deque()

    @abstractmethod
    def _serve(self, timeout_s: float | None) -> None:
        """Wait until a socket is ready, and serve it."""

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether a record has not gone out yet: `receive` and the next `send` go on with it."""

    def _next(self, timeout_s: float | None) -> tuple[str, Any] | None:
        """The next record and the name of its link, or None after `timeout_s`. Unreadable frames are counted."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._inbox:
                name, packed = self._inbox.popleft()
                try:
                    return name, unpack(packed)
                except CodecError:
                    self.num_unreadable += 1
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._serve(left_s)
            if not self._inbox and left_s == 0:
                return None

    def _linger(self) -> None:
        deadline = time.monotonic() + LINGER_S
        while self.is_waiting and (left_s := deadline - time.monotonic()) > 0:
            self._serve(left_s)


class Hub(_Endpoint):
    """The coordinator's end. `address` is tcp://host:port, port 0 or * for any free one. Use from one thread.

    Raises ValueError if the address is still taken after `bind_wait_s`.
    """

    def __init__(self, address: str, bind_wait_s: float = 0.0) -> None:
        deadline = time.monotonic() + bind_wait_s
        while True:
            try:
                self._listener = framing.listen(address, HUB_GIVE_UP_S)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise ValueError(f"cannot listen on {address}: {error.strerror}; choose a free port") from error
            time.sleep(RECONNECT_S)
        super().__init__()
        self.address = framing.address_of(self._listener)
        self._poller.watch(self._listener.fileno())
        self._streams: dict[int, Stream] = {}  # by descriptor; those without a name have not greeted
        self._stream_of: dict[str, Stream] = {}

    @property
    def is_waiting(self) -> bool:
        return any(stream.is_waiting for stream in self._stream_of.values())

    def identities(self) -> list[str]:
        """Of the links that are connected now."""
        return list(self._stream_of)

    def send(self, identities: Sequence[str], record: Any) -> None:
        """Multicast one record, encoded once. Never blocks; for an identity that is not connected it is lost."""
        self._post(identities, pack(record))

    def receive(self, timeout_s: float | None = None) -> tuple[str, Any] | None:
        """The next (identity, record), or None after `timeout_s`."""
        return self._next(timeout_s)

    def close(self) -> None:
        self._linger()
        for stream in self._streams.values():
            stream.close()
        self._listener.close()
        self._poller.close()

    def _post(self, identities: Sequence[str], packed: bytes) -> None:
        frame = framed(packed)
        for identity in identities:
            if (stream := self._stream_of.get(identity)) is not None:
                stream.outgoing.append(frame)
                self._poller.flush(stream)

    def _serve(self, timeout_s: float | None) -> None:
        for descriptor in self._poller.wait(timeout_s):
            if descriptor == self._listener.fileno():
                while (stream := framing.accept(self._listener, _LONGEST_GREETING)) is not None:
                    self._admit(stream)
            elif (stream := self._streams.get(descriptor)) is not None:
                if stream.is_waiting:
                    self._poller.flush(stream)
                self._read(stream)

    def _admit(self, stream: Stream) -> None:
        unnamed = [other for other in self._streams.values() if other.name is None]
        if len(unnamed) >= _MAX_UNNAMED:
            self.num_unreadable += 1
            self._drop(unnamed[0])
        self._streams[stream.fileno()] = stream
        self._poller.watch(stream.fileno())
        self._read(stream)  # a link greets at once

    def _read(self, stream: Stream) -> None:
        try:
            if not stream.fill():
                return
            for frame in stream.frames():
                if stream.name is None:
                    self._name(stream, frame)
                else:
                    self._inbox.append((stream.name, frame))
        except MalformedFrame:
            self.num_unreadable += 1
            self._drop(stream)
        except ConnectionClosed:
            self._drop(stream)

    def _name(self, stream: Stream, frame: bytes) -> None:
        """Records for this identity go to this stream from now on.

        An older stream of that name is still read: if it were closed, its link would reconnect and take the name back.
        """
        if not frame.startswith(GREETING):
            raise MalformedFrame
        try:
            stream.name = frame.removeprefix(GREETING).decode()
        except UnicodeDecodeError as error:
            raise MalformedFrame from error
        stream.longest = framing.LONGEST_FRAME
        self._stream_of[stream.name] = stream

    def _drop(self, stream: Stream) -> None:
        self._poller.unwatch(stream.fileno())
        del self._streams[stream.fileno()]
        if stream.name is not None and self._stream_of.get(stream.name) is stream:
            del self._stream_of[stream.name]
        stream.close()


class Link(_Endpoint):
    """The end of a rank or a client, known to the hub as `identity`. Use from one thread.

    It connects again whenever the hub is gone, or not there yet; records sent meanwhile arrive then, all of them or, if
    it `keeps` the "newest", only the last one.
    """

    def __init__(self, address: str, identity: str, *, keeps: str = "all") -> None:
        super().__init__()
        self.identity = identity
        self._hub = framing.resolve(address)
        self._greeting = framed(GREETING + identity.encode())
        self._keeps = keeps
        self._outgoing: deque[bytes] = deque()
        self._stream: Stream | None = None
        self._retry_at = 0.0  # when to connect, or to give up an attempt
        self._connect()

    @property
    def is_waiting(self) -> bool:
        return bool(self._outgoing)

    def send(self, record: Any) -> None:
        """Never blocks. A record that was on its way to a hub that died is lost."""
        self._post(pack(record))

    def receive(self, timeout_s: float | None = None) -> Any | None:
        """The next record, or None after `timeout_s`."""
        _, record = self._next(timeout_s) or ("", None)
        return record

    def close(self) -> None:
        self._linger()
        if self._stream is not None:
            self._stream.close()
        self._poller.close()

    def _post(self, packed: bytes) -> None:
        self._advance()  # detect that the hub is gone before giving it a record
        if self._keeps == "newest":
            num_begun = 1 if self._stream is not None and self._stream.num_begun else 0
            while len(self._outgoing) > num_begun:
                self._outgoing.pop()
        self._outgoing.append(framed(packed))
        if self._stream is not None:
            self._poller.flush(self._stream)

    def _serve(self, timeout_s: float | None) -> None:
        if self._stream is None or self._stream.preface:
            until_s = max(0.0, self._retry_at - time.monotonic())
            timeout_s = until_s if timeout_s is None else min(timeout_s, until_s)
        if timeout_s != 0:
            self._poller.wait(timeout_s)
        self._advance()

    def _advance(self) -> None:
        """Read what has arrived and send what waits; connect if need be."""
        stream = self._stream
        if stream is None:
            if time.monotonic() >= self._retry_at:
                self._connect()
            return
        if stream.is_waiting:
            self._poller.flush(stream)
        try:
            while stream.fill():
                self._inbox.extend(("", frame) for frame in stream.frames())
            if not stream.preface or time.monotonic() < self._retry_at:
                return
        except MalformedFrame:
            self.num_unreadable += 1
        except ConnectionClosed:
            pass
        self._poller.unwatch(stream.fileno())
        stream.close()
        self._stream = None
        self._retry_at = time.monotonic() + RECONNECT_S

    def _connect(self) -> None:
        connection = framing.connect(self._hub, LINK_GIVE_UP_S)
        self._retry_at = time.monotonic() + (RECONNECT_S if connection is None else CONNECT_S)
        if connection is not None:
            self._stream = Stream(connection, self._outgoing, preface=self._greeting)
            self._poller.flush(self._stream)
