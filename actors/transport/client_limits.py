"""What the connections of clients may cost the hub: bytes that wait on either side of them.

ZeroMQ's limits count whole messages: frames of a message that never ends, and long records for a client that reads
nothing, would fill the memory below them. The kernel counts the bytes that passed each connection in either direction
(TCP_INFO, Linux), the hub those of the messages that it read and wrote; what they differ by is waiting. Knows no
record.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import zmq

from actors.transport.admission import Admission

MOST_QUEUED_BYTES = 1 << 24
"""Bytes that wait for a client that does not read; further records for it are lost, as for a client that is gone."""
MOST_WAITING_BYTES = 1 << 24
"""Bytes of a connection that ZeroMQ reads ahead of the hub, besides two of the longest records; with more it is closed.
Its reading is never stopped, since a reset meanwhile ends the process (ZeroMQ 4.3.5,
github.com/zeromq/libzmq, issues 3937 and 4767)."""
MOST_CONNECTIONS_WAITING = 4
"""Connections of one key, closed ones included, may have so many times those bytes together."""
RECEIVE_BUFFER = 1 << 18
"""Bytes of one connection that the kernel reads ahead of ZeroMQ; it takes twice as many."""
_LOOK_MS = 50
_CONNECTED_BYTES = 1000
"""Bytes that a connection may receive outside of messages: greeting and handshake,"""
_BEAT_BYTES_PER_S = 100
"""and the heartbeats of ZMTP."""
_TCP_BYTES = struct.Struct("120xQQ")
"""`tcpi_bytes_acked`, `tcpi_bytes_received` of Linux' struct tcp_info."""
_EVENT = struct.Struct("=Hi")
"""An event of a socket, and the descriptor it is about."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


def wire_size(payload_len: int) -> int:
    """Bytes of a frame on its way: ZMTP's header, and the command, nonce, flags and authenticator of CurveZMQ."""
    sealed = payload_len + 33
    return sealed + (2 if sealed <= 255 else 9)


@dataclass(slots=True, eq=False)
class _Connection:
    """Bytes of one connection. Read and posted ones are counted by the hub's thread, acked ones by the guard's."""

    wire: socket.socket
    opened_at: float = field(default_factory=time.monotonic)
    num_read: int = _CONNECTED_BYTES
    num_posted: int = 0
    num_acked: int = 0
    link: str = ""
    user_id: str = ""
    """The user that ZAP named; this and `link` are from the first message that was read."""

    def num_waiting(self, now: float) -> int:
        """Received bytes that are in no message which the hub has read."""
        self.num_acked, num_received = _TCP_BYTES.unpack(
            self.wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_BYTES.size)
        )
        return int(num_received - self.num_read - _BEAT_BYTES_PER_S * (now - self.opened_at))


class ConnectionGuard:
    """Counts the bytes of all connections to a bound socket, and closes those with more than `most_waiting` bytes that
    wait for the hub, those of a key with `MOST_CONNECTIONS_WAITING` times as many, and those of peers that are not
    admitted any more. Its thread also answers for the `admission`.

    A thread from construction, before the socket is bound, to `close`, before the socket is closed.
    """

    def __init__(self, listener: zmq.Socket[bytes], admission: Admission) -> None:
        self.most_waiting = 1 << 25
        self._listener = listener
        self._admission = admission
        self._monitor = listener.get_monitor_socket(_EVENTS)
        self._connections: dict[int, _Connection] = {}
        self._of_link: dict[str, _Connection] = {}
        self._left: Counter[str] = Counter()  # bytes that closed connections of a user left to be read
        self._thread = threading.Thread(target=self._run, name="client-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._listener.closed:
            self._listener.disable_monitor()
        self._thread.join()

    @property
    def has_left(self) -> bool:
        """Whether closed connections left something."""
        return bool(self._left)

    def forget_closed(self) -> None:
        """All that was sent over closed connections was read, or is lost."""
        self._left = Counter()

    def count_read(self, link: str, message: list[zmq.Frame]) -> None:
        """A message of this link was read."""
        connection = self._connections.get(int(message[0].get(zmq.SRCFD)))
        if connection is not None:
            connection.num_read += sum([wire_size(len(frame)) for frame in message])
            connection.link, self._of_link[link] = link, connection
            connection.user_id = str(message[0].get("User-Id"))

    def takes(self, link: str, payload_len: int) -> bool:
        """Whether there is room for a record to this link, which is then counted."""
        if (connection := self._of_link.get(link)) is None:
            return True
        connection.num_posted = max(connection.num_posted, connection.num_acked)
        if connection.num_posted - connection.num_acked > MOST_QUEUED_BYTES:
            return False
        connection.num_posted += wire_size(payload_len)
        return True

    # --- the guard's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        sources = [(self._monitor, zmq.POLLIN), (self._admission.asked, zmq.POLLIN)]
        event, looked_at = 0, time.monotonic()
        while event != zmq.EVENT_MONITOR_STOPPED:
            ready = dict(zmq.zmq_poll(sources, _LOOK_MS if self._connections else -1))
            if self._admission.asked in ready:
                self._admission.answer(self._is_full)
            if self._monitor in ready:
                event, descriptor = _EVENT.unpack(self._monitor.recv_multipart()[0])
                self._follow(event, descriptor)
            if (now := time.monotonic()) - looked_at >= _LOOK_MS / 1e3:  # not with every connection that comes or goes
                looked_at = now
                self._close_connections(now)
        self._admission.asked.close()
        self._monitor.close()
        for connection in self._connections.values():
            connection.wire.close()

    def _follow(self, event: int, descriptor: int) -> None:
        """A connection came or went. The copy of its descriptor is closed here alone, so it names no other one."""
        if (before := self._connections.pop(descriptor, None)) is not None:
            with contextlib.suppress(OSError):
                self._left[before.user_id] += max(0, before.num_waiting(time.monotonic()))
            before.wire.close()
            if self._of_link.get(before.link) is before:
                del self._of_link[before.link]
        if event == zmq.EVENT_ACCEPTED:
            with contextlib.suppress(OSError):  # it has gone already
                self._connections[descriptor] = _Connection(socket.socket(fileno=socket.dup(descriptor)))

    def _is_full(self, user_id: str) -> bool:
        """Whether so much of this user's closed connections is still unread that it gets no further one."""
        return self._left[user_id] > MOST_CONNECTIONS_WAITING * self.most_waiting

    def _close_connections(self, now: float) -> None:
        """Those that are overfull, alone or together, or whose peer was taken away."""
        waiting = self._left.copy()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                num_waiting = max(0, connection.num_waiting(now))
                waiting[user := connection.user_id] += num_waiting
                is_overfull = num_waiting > self.most_waiting
                is_overfull |= bool(
                    user and num_waiting and waiting[user] > MOST_CONNECTIONS_WAITING * self.most_waiting
                )
                if is_overfull or (user and not self._admission.peer(user)):
                    connection.wire.shutdown(socket.SHUT_RDWR)
