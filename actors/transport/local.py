"""Records between processes of one machine: bytes over a Unix socket, written by the thread that sends.

ZeroMQ hands each record to a thread of its own at either end, so that three threads wake for one record; here the one
that receives does. The hub listens in a folder that no other user can open, both ends look whose process the other is,
and a link proves the key of its peer with its first frame. Loss, order and limits are those of `channel.py`. Knows
neither what records mean nor how else the hub is reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.transport import codec
from actors.transport.codec import CODEC, LONGEST_TO_HUB, LONGEST_TO_LINK, RECONNECT_MS, CodecError, Reader
from actors.transport.keys import PROOF_BYTES, LinkKey

_SIZE = struct.Struct("=I")
"""The number of bytes of a frame, before it."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a peer."""
_CHUNK = 1 << 16
_LONGEST_PATH = 107


def socket_path(folder: str, address: str, hub: bytes) -> str | None:
    """Where the hub with this address and this public half of its key listens; None unless the folder is this user's
    alone."""
    with contextlib.suppress(OSError):
        status = os.stat(folder, follow_symlinks=False)
        name = hashlib.blake2b(address.encode() + hub, digest_size=8).hexdigest()
        path = str(Path(folder, f"hub-{name}"))
        is_own = status.st_uid == os.getuid() and not status.st_mode & 0o077
        return path if is_own and len(os.fsencode(path)) <= _LONGEST_PATH else None
    return None


class FrameStream:
    """One end of a connection: whole frames, in order. Nothing here waits: what the kernel does not take at once is
    written by a thread, which lasts until all of it is."""

    def __init__(self, wire: socket.socket, longest: int) -> None:
        wire.setblocking(False)
        self.wire = wire
        self._longest = longest
        self._arrived = bytearray()
        self._unsent: deque[bytes] = deque()
        self._num_written = 0  # bytes of the first of them
        self._is_open = True
        self._writer: threading.Thread | None = None
        self._in_use = threading.Lock()

    def send(self, payload: bytes) -> bool:
        """Whether the peer is there. It loses what exceeds `MOST_QUEUED` frames that it has not read."""
        with self._in_use:
            if not self._is_open or len(self._unsent) >= codec.MOST_QUEUED:
                return self._is_open
            self._unsent.append(_SIZE.pack(len(payload)) + payload)
            if len(self._unsent) == 1:  # else the thread is at it
                self._write()
                if self._unsent:
                    self._writer = threading.Thread(target=self._write_rest, name="stream", daemon=True)
                    self._writer.start()
            return self._is_open

    def receive(self) -> bytes | None:
        """The next frame; None if none has arrived. Raises EOFError if the peer is gone, or its frame is too long."""
        arrived = self._arrived
        while True:
            if len(arrived) >= _SIZE.size:
                end = _SIZE.size + _SIZE.unpack_from(arrived)[0]
                if end > _SIZE.size + self._longest:
                    raise EOFError
                if len(arrived) >= end:
                    frame = bytes(memoryview(arrived)[_SIZE.size : end])
                    del arrived[:end]
                    return frame
            try:
                chunk = self.wire.recv(_CHUNK)
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError from error
            if not chunk:
                raise EOFError
            arrived += chunk

    def close(self, linger_ms: int = 0) -> None:
        """Writes for so long what is still to be written."""
        writer = self._writer
        if writer is not None:
            writer.join(linger_ms / 1e3)
        with self._in_use:
            self._end()
            with contextlib.suppress(OSError):
                self.wire.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread
        if writer is not None:
            writer.join()
        self.wire.close()

    def _write(self) -> None:
        try:
            while self._unsent:
                frame = self._unsent[0]
                self._num_written += self.wire.send(memoryview(frame)[self._num_written :])
                if self._num_written == len(frame):
                    self._unsent.popleft()
                    self._num_written = 0
        except BlockingIOError:
            return
        except OSError:
            self._end()

    def _end(self) -> None:
        self._is_open = False
        self._unsent.clear()

    def _write_rest(self) -> None:
        poll = select.poll()
        poll.register(self.wire, select.POLLOUT)
        while True:
            poll.poll()
            with self._in_use:
                self._write()
                if not self._unsent:
                    return


class LocalServer:
    """The hub's end: a connection for each link. Receive in one thread; others may `send` as well.

    `admits` is asked with the name of a link and its proof. `fileno` is readable when there may be something to
    receive.
    """

    def __init__(self, path: str, admits: Callable[[str, bytes], bool]) -> None:
        self._path = path
        self._admits = admits
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a predecessor, whose port this hub has already
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen()
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._streams: dict[int, tuple[FrameStream, str]] = {}  # and the links' names, once they are proved
        self._by_name: dict[str, FrameStream] = {}
        self._readable: dict[int, None] = {}  # in the order in which they are read

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def identities(self) -> list[str]:
        """The links that are connected."""
        return [*self._by_name]

    def send(self, identity: str, payload: bytes) -> bool:
        """Whether such a link is connected."""
        stream = self._by_name.get(identity)
        return stream is not None and stream.send(payload)

    def receive(self) -> tuple[str, bytes] | None:
        """The name of a link and its next frame; links are read in turn. None if none has arrived."""
        if self._epoll.closed:
            return None
        for descriptor, _ in self._epoll.poll(0):
            if descriptor in self._streams:
                self._readable[descriptor] = None
            else:
                self._accept()
        while self._readable:
            descriptor = next(iter(self._readable))
            del self._readable[descriptor]
            stream, identity = self._streams[descriptor]
            try:
                if (frame := stream.receive()) is None:
                    continue
                self._readable[descriptor] = None
                if identity:
                    return identity, frame
                self._name(descriptor, stream, frame)
            except EOFError:
                self._drop(descriptor)
        return None

    def close(self, linger_ms: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._listener.close()
        for descriptor in [*self._streams]:
            self._drop(descriptor, linger_ms)
        self._epoll.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            wire, _ = self._listener.accept()
            if not _is_own(wire):
                wire.close()
                return
            self._streams[wire.fileno()] = FrameStream(wire, LONGEST_TO_HUB), ""
            self._epoll.register(wire, select.EPOLLIN)

    def _name(self, descriptor: int, stream: FrameStream, hello: bytes) -> None:
        """The first frame of a link. It takes the place of an earlier one of this name."""
        identity, proof = hello[:-PROOF_BYTES].decode(errors="replace"), hello[-PROOF_BYTES:]
        if not self._admits(identity, proof):
            raise EOFError
        for before, (_, name) in [*self._streams.items()]:
            if name == identity:
                self._drop(before)
        self._streams[descriptor] = stream, identity
        self._by_name[identity] = stream

    def _drop(self, descriptor: int, linger_ms: int = 0) -> None:
        stream, identity = self._streams.pop(descriptor)
        self._readable.pop(descriptor, None)
        if self._by_name.get(identity) is stream:
            del self._by_name[identity]
        self._epoll.unregister(stream.wire)
        stream.close(linger_ms)


class LocalLink(Reader):
    """The end of a rank or of the owner on the hub's machine; as `Link`. A thread reconnects once the hub is gone."""

    def __init__(self, path: str, identity: str, key: LinkKey) -> None:
        """Raises OSError if no hub listens there."""
        super().__init__()
        self.identity = identity
        self._path = path
        self._hello = identity.encode() + key.proof(identity)
        self._unsent: deque[bytes] = deque()  # while there is no hub
        self._arrived: deque[bytes] = deque()  # from a hub that is gone
        self._in_use = threading.Lock()
        self._is_closed = False
        self._connected = threading.Event()
        self._stream = self._connect()
        self._connected.set()

    def send(self, record: Any) -> None:
        """Never blocks. A record that was on its way to a hub that died is lost."""
        self._post(CODEC.encode(record))

    def _post(self, payload: bytes) -> None:
        with self._in_use:
            if self._connected.is_set():
                if self._stream.send(payload):
                    return
                self._lose()
            if len(self._unsent) < codec.MOST_QUEUED:
                self._unsent.append(payload)

    def receive(self, timeout_s: float | None = None) -> Any | None:
        """The next record, or None after `timeout_s`. Unreadable ones are counted and skipped."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                if (frame := self._next_frame()) is not None:
                    return CODEC.decode(frame)
            except EOFError:
                with self._in_use:
                    self._lose()
            except CodecError as error:
                self.refuse("the hub", error)
                continue
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            if self._connected.is_set():
                _await_input(self._stream.wire, left_s)
            else:
                self._connected.wait(left_s)

    def is_refused(self, timeout_s: float) -> bool:
        """Whether the hub ends the connection within `timeout_s`: the key is not admitted."""
        poll = select.poll()
        poll.register(self._stream.wire, select.POLLRDHUP)
        return bool(poll.poll(timeout_s * 1e3))

    def close(self) -> None:
        with self._in_use:
            self._is_closed = True
            self._stream.close(codec.LINGER_MS)

    def _next_frame(self) -> bytes | None:
        if self._arrived:
            return self._arrived.popleft()
        return self._stream.receive() if self._connected.is_set() else None

    def _connect(self) -> FrameStream:
        wire = socket.socket(socket.AF_UNIX)
        wire.setblocking(False)  # a hub that accepts no more has many waiting
        try:
            wire.connect(self._path)
            if not _is_own(wire):
                raise PermissionError
        except OSError:
            wire.close()
            raise
        stream = FrameStream(wire, LONGEST_TO_LINK)
        stream.send(self._hello)
        return stream

    def _lose(self) -> None:
        if self._connected.is_set() and not self._is_closed:
            self._connected.clear()
            with contextlib.suppress(EOFError):
                self._arrived.extend(iter(self._stream.receive, None))
            self._stream.close()
            threading.Thread(target=self._connect_again, name="reconnect", daemon=True).start()

    def _connect_again(self) -> None:
        """Tries until there is a hub, which is sent what waited, or the link is closed."""
        while not self._is_closed:
            time.sleep(RECONNECT_MS / 1e3)
            with contextlib.suppress(OSError), self._in_use:
                if self._is_closed:
                    return
                self._stream = self._connect()
                while self._unsent and self._stream.send(self._unsent[0]):
                    self._unsent.popleft()
                self._connected.set()
                return


def _await_input(wire: socket.socket, timeout_s: float | None) -> None:
    if timeout_s is not None and timeout_s < codec.SELECT_BELOW_S and wire.fileno() < codec.FD_SETSIZE:
        select.select([wire], (), (), timeout_s)
        return
    poll = select.poll()
    poll.register(wire, select.POLLIN)
    poll.poll(None if timeout_s is None else timeout_s * 1e3)


def _is_own(wire: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    _, user, _ = _CREDENTIALS.unpack(wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user == os.getuid()
