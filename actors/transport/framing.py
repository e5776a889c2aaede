"""Framed TCP without a thread of its own: whole frames, in order, and no call that waits for a peer.

A frame is its length in four bytes and that many more. What a socket does not take at once waits in a queue until it
does; whoever owns the connections says when to look, with one `Poller` for all of them. Knows neither records nor
names, and opens nothing again that broke: that is for `wire.py`.
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
"""Bytes. A report with all the spans there can be has a few millions."""
_HEADER = 4
_CHUNK = 1 << 16
_BACKLOG = 1024
_ABORT = struct.pack("ii", 1, 0)
_FINE_S = 0.01
"""Of a shorter wait a millisecond, the grain of epoll's clock, is too much: worth another system call."""
_FD_SETSIZE = 1024
"""Descriptors from here on `select` cannot watch."""

Place = tuple[socket.AddressFamily, tuple]
"""A host and port as the operating system has them."""


class ConnectionOver(Exception):
    """Nothing more will come: the peer closed, died, or cannot be reached."""


class Garbled(ConnectionOver):
    """No frame is so long, so that nobody can tell where the next one would begin."""


def framed(payload: bytes) -> bytes:
    assert len(payload) <= LONGEST_FRAME
    return len(payload).to_bytes(_HEADER, "big") + payload


def place_of(address: str) -> Place:
    """Of tcp://host:port, port 0 or * for any free one. OSError for a host that nobody knows."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    port = "0" if port == "*" else port
    family, _, _, _, name = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    return family, name


def listen(address: str, give_up_s: int) -> socket.socket:
    """OSError if the address cannot be had."""
    family, name = place_of(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a predecessor's connections may linger
        _tune(listener, give_up_s)  # accepted sockets inherit it
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
    """The next who came, if there is one and this process may still open a descriptor."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    connection.setblocking(False)
    return Stream(connection, longest=longest)


def connect(place: Place, give_up_s: int) -> socket.socket | None:
    """A socket on its way to be connected: it takes nothing until it is. None if it is clear that it never will be."""
    family, name = place
    connection = socket.socket(family, socket.SOCK_STREAM)
    _tune(connection, give_up_s)
    error = connection.connect_ex(name)
    # While nobody listens, the kernel may choose that very port as ours: such a socket is connected to itself, and
    # would keep the port from whoever wants to listen there.
    if error not in (0, errno.EINPROGRESS) or connection.getsockname()[:2] == name[:2]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        connection.close()
        return None
    return connection


def _tune(connection: socket.socket, give_up_s: int) -> None:
    """A host that was cut off sends no word of it. Without these, TCP takes two hours to ask after an idle peer, and
    sends unanswered bytes again for a quarter of an hour, ever less often; so it would notice late that the network is
    back, too. TCP_USER_TIMEOUT bounds both, and also how long a peer may read nothing while its buffer is full."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, give_up_s // 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, give_up_s // 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, give_up_s * 1000)


class Stream:
    """One connection. A frame stays in `outgoing` until the kernel has all of it: another stream may begin it anew."""

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
        """What is still to be sent before `outgoing`."""
        self.num_begun = 0
        """Bytes of the first of `outgoing` that the kernel has."""
        self.longest = longest
        """Bytes of a frame that this end puts up with."""
        self._connection = connection
        self._incoming = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def is_waiting(self) -> bool:
        """For the socket to take more."""
        return bool(self.preface or self.outgoing)

    def send(self, frame: bytes) -> None:
        self.outgoing.append(frame)
        self.flush()

    def flush(self) -> None:
        """As far as it goes. On a broken connection that is nowhere; `fill` tells, behind what still came."""
        try:
            while self.preface:
                self.preface = self.preface[self._connection.send(self.preface) :]
            while self.outgoing:
                frame = self.outgoing[0]
                rest = memoryview(frame)[self.num_begun :] if self.num_begun else frame
                num_taken = self._connection.send(rest)
                if num_taken < len(rest):
                    self.num_begun += num_taken
                    return
                self.num_begun = 0
                self.outgoing.popleft()
        except OSError:
            return

    def fill(self) -> bool:
        """Take in some of what has come; False if nothing has. ConnectionOver once it is over."""
        try:
            chunk = self._connection.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionOver from error
        if not chunk:
            raise ConnectionOver
        self._incoming += chunk
        return True

    def frames(self) -> Iterator[bytes]:
        """The whole frames among what was taken in. Garbled for one that is longer than `longest`."""
        begin, incoming = 0, self._incoming
        while len(incoming) - begin >= _HEADER:
            payload = begin + _HEADER
            end = payload + int.from_bytes(incoming[begin:payload], "big")
            if end - payload > self.longest:
                raise Garbled
            if end > len(incoming):
                break
            yield bytes(incoming[payload:end])
            begin = end
        del incoming[:begin]

    def close(self) -> None:
        """What came and was never read would make the kernel take back what it has not delivered yet."""
        with contextlib.suppress(ConnectionOver):
            self.fill()
        self._connection.close()


class Poller:
    """Which connections have something to say or room for more. Told only of what changes."""

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

    def forget(self, descriptor: int) -> None:
        """Before it is closed: the next that is opened has the same number."""
        del self._masks[descriptor]
        self._epoll.unregister(descriptor)

    def wait(self, timeout_s: float | None) -> list[int]:
        """Descriptors about which there is something to know; none after `timeout_s`."""
        if timeout_s is not None and 0 < timeout_s < _FINE_S and self._epoll.fileno() < _FD_SETSIZE:
            select.select((self._epoll,), (), (), timeout_s)
            timeout_s = 0
        return [descriptor for descriptor, _ in self._epoll.poll(timeout_s)]

    def close(self) -> None:
        self._epoll.close()
