"""Framed TCP without threads: whole frames, in order, and no call that blocks on a peer.

A frame is its length in four bytes, big-endian, and that many bytes. Bytes that the kernel does not accept wait in a
queue; the owner of the connections decides when to go on, with one `Poller` for all of them. Knows neither records nor
roles, and reconnects nothing: that is for `channel.py`.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator

LONGEST_FRAME = 1 << 28
"""Bytes. A report with as many spans as are kept has a few millions."""
_HEADER = 4
_CHUNK = 1 << 16
_BACKLOG = 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_SELECT_BELOW_S = 0.01
"""epoll counts in milliseconds; below this timeout that is too coarse, so `select` waits, at one more system call."""
_FD_SETSIZE = 1024
"""`select` cannot watch descriptors from this number on."""

SocketAddress = tuple[socket.AddressFamily, tuple]


class ConnectionClosed(Exception):
    """No more frames: the peer closed, died, or cannot be reached."""


class MalformedFrame(ConnectionClosed):
    """A length above the limit: the beginning of the next frame is unknown."""


def framed(payload: bytes) -> bytes:
    assert len(payload) <= LONGEST_FRAME
    return len(payload).to_bytes(_HEADER, "big") + payload


def resolve(address: str) -> SocketAddress:
    """Of tcp://host:port; port 0 or * is any free one. Raises OSError for an unknown host."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    port = "0" if port == "*" else port
    family, _, _, _, name = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    return family, name


def listen(address: str, give_up_s: int) -> socket.socket:
    """Raises OSError if the address is taken or not of this host."""
    family, name = resolve(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a predecessor may linger
        _configure(listener, give_up_s)  # accepted sockets inherit it
        listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def accept(listener: socket.socket, longest: int = LONGEST_FRAME) -> Stream | None:
    """The next connection, or None if there is none, or no descriptor left for it."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    connection.setblocking(False)
    return Stream(connection, longest=longest)


def connect(place: SocketAddress, give_up_s: int) -> socket.socket | None:
    """A socket that is being connected and accepts no bytes until it is; None if the attempt failed at once."""
    family, name = place
    connection = socket.socket(family, socket.SOCK_STREAM)
    _configure(connection, give_up_s)
    error = connection.connect_ex(name)
    # If no process listens there, the kernel may choose that very port as the local one. Such a socket is connected to
    # itself, and would keep the port from a process that wants to listen on it.
    if error not in (0, errno.EINPROGRESS) or connection.getsockname()[:2] == name[:2]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        connection.close()
        return None
    return connection


def _configure(connection: socket.socket, give_up_s: int) -> None:
    """Close the connection once its peer has not answered for `give_up_s`: a host that is cut off sends no FIN.

    By default TCP probes an idle peer after two hours, and repeats unanswered bytes for a quarter of an hour at growing
    intervals. TCP_USER_TIMEOUT bounds both, and also how long a peer with a full buffer may read nothing.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, give_up_s // 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, give_up_s // 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, give_up_s * 1000)


class Stream:
    """One connection. A frame stays in `outgoing` until the kernel has all of it, so that another stream can repeat it.

    `preface` is sent before `outgoing`; `longest` is the limit of a received frame, in bytes; `name` is for the owner.
    """

    def __init__(
        self,
        connection: socket.socket,
        outgoing: deque[bytes] | None = None,
        *,
        preface: bytes = b"",
        longest: int = LONGEST_FRAME,
    ) -> None:
        self.outgoing: deque[bytes] = deque() if outgoing is None else outgoing
        self.preface = preface
        self.num_begun = 0  # bytes of outgoing[0] that the kernel has
        self.longest = longest
        self.name: str | None = None
        self._connection = connection
        self._incoming = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def is_waiting(self) -> bool:
        """Whether there are bytes that the kernel has not accepted."""
        return bool(self.preface or self.outgoing)

    def flush(self) -> None:
        """Send what the kernel accepts: nothing on a broken connection, where `fill` raises after the last frame."""
        try:
            while self.preface:
                self.preface = self.preface[self._connection.send(self.preface) :]
            while self.outgoing:
                frame = self.outgoing[0]
                rest = memoryview(frame)[self.num_begun :] if self.num_begun else frame
                num_sent = self._connection.send(rest)
                if num_sent < len(rest):
                    self.num_begun += num_sent
                    return
                self.num_begun = 0
                self.outgoing.popleft()
        except OSError:
            return

    def fill(self) -> bool:
        """Read some of what has arrived; False if there is nothing. Raises ConnectionClosed at the end."""
        try:
            chunk = self._connection.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionClosed from error
        if not chunk:
            raise ConnectionClosed
        self._incoming += chunk
        return True

    def frames(self) -> Iterator[bytes]:
        """The whole frames of what was read. Raises MalformedFrame for one that is longer than `longest`."""
        begin, incoming = 0, self._incoming
        while len(incoming) - begin >= _HEADER:
            payload = begin + _HEADER
            end = payload + int.from_bytes(incoming[begin:payload], "big")
            if end - payload > self.longest:
                raise MalformedFrame
            if end > len(incoming):
                break
            yield bytes(incoming[payload:end])
            begin = end
        del incoming[:begin]

    def close(self) -> None:
        """Read before closing: unread bytes make TCP send RST, which discards data still in flight to the peer."""
        with contextlib.suppress(ConnectionClosed):
            self.fill()
        self._connection.close()


class Poller:
    """Which descriptors can be read, or written where that was asked for; epoll_ctl is called for changes only."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._masks: dict[int, int] = {}

    def watch(self, descriptor: int, *, writable: bool = False) -> None:
        mask = select.EPOLLIN | select.EPOLLOUT if writable else select.EPOLLIN
        known = self._masks.get(descriptor)
        if known == mask:
            return
        (self._epoll.register if known is None else self._epoll.modify)(descriptor, mask)
        self._masks[descriptor] = mask

    def flush(self, stream: Stream) -> None:
        """Send what the kernel accepts, and watch for room if something is left."""
        stream.flush()
        self.watch(stream.fileno(), writable=stream.is_waiting)

    def unwatch(self, descriptor: int) -> None:
        """Before it is closed, because its number is used again."""
        del self._masks[descriptor]
        self._epoll.unregister(descriptor)

    def wait(self, timeout_s: float | None) -> list[int]:
        """Descriptors that are ready; none after `timeout_s`."""
        if timeout_s is not None and 0 < timeout_s < _SELECT_BELOW_S and self._epoll.fileno() < _FD_SETSIZE:
            select.select((self._epoll,), (), (), timeout_s)
            timeout_s = 0
        return [descriptor for descriptor, _ in self._epoll.poll(timeout_s)]

    def close(self) -> None:
        self._epoll.close()
