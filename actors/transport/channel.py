"""The control line: records over ZeroMQ between the coordinator and every rank and client.

The coordinator listens with a `Hub`, which has one port for ranks and the owner of the engine and one for its other
clients, which may cost only so much; each connects with a `Link`. Four one-way records make a round; a role's records
are sent to each of its ranks, so no rank waits for its lead to pass them on. The same code connects threads, processes
and hosts; between threads of one process records are handed over as they are (`Hub(near=True)`, `near.py`), and ranks
on the hub's machine may have a Unix socket in ZeroMQ's place (`Hub(folder=...)`, `local.py`). Carries no tensors and
decides nothing; lost records are detected elsewhere (`actors/coordinator/membership.py`).

Every connection over a network is encrypted and authenticated by CurveZMQ (RFC 26): a key admits one peer (`keys.py`),
at its port and under its own names alone (`admission.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from socket import socketpair
from typing import TYPE_CHECKING, Any, TypeAlias

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from actors.transport import client_limits, codec, work_meter
from actors.transport.admission import CLIENTS, RANKS, Admission
from actors.transport.client_limits import ConnectionGuard
from actors.transport.codec import CODEC, LONGEST_TO_HUB, LONGEST_TO_LINK, RECONNECT_MS, CodecError, Reader
from actors.transport.keys import HubKeys, LinkKey, is_client, peer_of, public_half
from actors.transport.near import Exchange, Handle, NearLink, exchange_at
from actors.transport.work_meter import WorkMeter

if TYPE_CHECKING:
    from actors.transport.local import LocalLink, LocalServer

CONNECT_MS = 1000
"""An unanswered attempt is replaced after so long: TCP itself would retry at growing intervals."""
HANDSHAKE_MS = 2000
"""A connection that is not authenticated by then is closed."""
BEAT_MS = 1000
"""Time between two ZMTP heartbeats of a link; ZeroMQ's own thread sends and answers them, however long a pass takes."""
GIVE_UP_MS = 3000
"""Both ends close a connection without traffic for so long: a host that is cut off sends no FIN."""
LONGEST_OF_CLIENT = 1 << 20
"""Bytes of a client's record, until `limit_clients` says what the longest request takes."""
_MONITORS = itertools.count()
_REFUSAL_POLL_MS = 20
"""ZeroMQ does not say when a socket has given its connection up: it is asked so often."""
_THREADS = {RANKS: 1, CLIENTS: 2}
"""The thread of ZeroMQ that serves each port, as a bit."""
_NEAR_HUBS: dict[tuple[int, str], tuple[Exchange, Admission]] = {}
"""Hubs that threads of this process reach without a network, by process (a fork shares no thread) and address."""


def link_name(identity: str, incarnation: int) -> str:
    """The name of a process's link: successive processes of one rank have different ones."""
    return f"{identity}#{incarnation}"


def heart_of(link: str) -> str:
    """The name of the link of the same process over which its heartbeats go, and recalls come."""
    return f"{link}/heart"


def _close(context: zmq.Context, watched: Sequence[tuple[zmq.Socket[bytes], int]]) -> None:
    for socket, _ in watched:
        socket.close(codec.LINGER_MS)
    context.destroy(codec.LINGER_MS)


class _Endpoint(Reader):
    """What both ends share: sockets, of which those that use a network are in a context of this endpoint alone, so that
    `close` waits for what is on its way."""

    def __init__(self, io_threads: int = 1) -> None:
        super().__init__()
        self._context = zmq.Context(io_threads)
        self._watched: list[tuple[zmq.Socket[bytes], int]] = []  # the one that was opened last first
        self._also_watched: list[int] = []  # descriptors that end a wait
        self._ended_by: list[int] = []  # those of them that ended the last one
        self._descriptors: list[int] = []
        self._in_use = threading.Lock()  # a socket may be used by one thread after another, not by two at a time

    def _open(self, context: zmq.Context, kind: int, longest: int) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.linger = codec.LINGER_MS
        socket.sndhwm = codec.MOST_QUEUED
        socket.rcvhwm = 0  # no limit: see `client_limits.MOST_WAITING_BYTES`
        socket.maxmsgsize = longest
        socket.handshake_ivl = HANDSHAKE_MS
        self._watched.insert(0, (socket, zmq.POLLIN))
        self._descriptors.insert(0, int(socket.get(zmq.FD)))
        return socket

    def close(self) -> None:
        _close(self._context, self._watched)

    def _wait(self, timeout_s: float | None, num_sockets: int | None = None) -> zmq.Socket[bytes] | None:
        """A socket to which a record came within `timeout_s`; of two, the one that was opened last. Only so many are
        waited for, if that is given. None also if another descriptor ends the wait."""
        watched = self._watched[:num_sockets]
        descriptors = [*self._descriptors[:num_sockets], *self._also_watched]
        sources = [*watched, *((descriptor, zmq.POLLIN) for descriptor in self._also_watched)]
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._ended_by = []
        while True:
            for socket, _ in watched:  # ZeroMQ looks at a socket's descriptor when its events are read
                if int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
                    return socket
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            if left_s is not None and left_s < codec.SELECT_BELOW_S and max(descriptors) < codec.FD_SETSIZE:
                ready = select.select(descriptors, (), (), left_s)[0]
            else:
                ready = [source for source, _ in zmq.zmq_poll(sources, -1 if left_s is None else ceil(left_s * 1e3))]
            self._ended_by = [descriptor for descriptor in self._also_watched if descriptor in ready]
            if self._ended_by:
                return None

    def _messages(self, timeout_s: float | None) -> Iterator[tuple[zmq.Socket[bytes], list[zmq.Frame]]]:
        """The frames of each message that arrives within `timeout_s`, and its socket."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._next_message(timeout_s)) is not None:
            yield message
            if deadline is not None and (timeout_s := deadline - time.monotonic()) <= 0:
                return

    def _next_message(self, timeout_s: float | None) -> tuple[zmq.Socket[bytes], list[zmq.Frame]] | None:
        with self._in_use:
            socket = self._wait(timeout_s)
            return None if socket is None else (socket, socket.recv_multipart(copy=False))


class Hub(_Endpoint):
    """The coordinator's end. Ranks and the owner of the engine connect to `address`, its other clients to
    `client_address`; both are tcp://host:port, port 0 or * for any free one. Receive in one thread; others may `send`
    as well: what they send while that one waits for a record, it sends for them.

    Raises ValueError if an address is still taken after `bind_wait_s`. Peers are read in turn, and clients when no rank
    has sent anything, for a share of the time (`work_meter`), through a thread of ZeroMQ of their own. With
    `near`, links that this process opens to `address` with an admitted key, while the hub is there, hand records over
    (`near.py`): no bytes, network, encryption or thread in between. By `serve_near`, they are handled where they are
    sent; without it they are received, before those of other processes. Only for a hub that lives as long as they do,
    since such a link finds no successor of it in another process. In a `folder` that no other user of this machine can
    open ranks may connect too; they are read before those that connect over a network.
    """

    def __init__(
        self,
        address: str,
        keys: HubKeys,
        bind_wait_s: float = 0.0,
        *,
        client_address: str = "",
        near: bool = False,
        folder: str = "",
    ) -> None:
        super().__init__(io_threads=2)
        self._keys = keys
        self._admission = Admission(self._context, keys)
        self._client_socket = self._open_router(self._context)
        self._client_socket.rcvbuf = client_limits.RECEIVE_BUFFER
        self._guard = ConnectionGuard(self._client_socket, self._admission)
        self._meter = WorkMeter()
        self.limit_clients(LONGEST_OF_CLIENT)
        self._socket = self._open_router(self._context)
        self._names: dict[str, zmq.Socket[bytes]] = {}
        self._unsent: deque[tuple[str, bytes]] = deque()
        self._woken, self._wakes = socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        self._also_watched = [self._woken.fileno()]
        self._is_called = False
        self._is_closing = False
        self._near: Exchange | None = None
        self._local: LocalServer | None = None
        self._taken: tuple[str, Any] | None = None  # from another process of this machine
        self.address = ""
        deadline = time.monotonic() + bind_wait_s
        self.address = self._bind(self._socket, RANKS, address, deadline)
        client_address = client_address or f"{self.address.rpartition(':')[0]}:*"
        self.client_address = self._bind(self._client_socket, CLIENTS, client_address, deadline)
        if near:
            self._near = exchange_at(self.address, public_half(keys.private))
            self._near.wake = self._end_wait
            _NEAR_HUBS[os.getpid(), self.address] = self._near, self._admission
        if folder:
            self._serve_in(folder)

    def _serve_in(self, folder: str) -> None:
        from actors.transport.local import LocalServer, socket_path  # for processes of one machine alone

        if path := socket_path(folder, self.address, public_half(self._keys.private)):
            self._local = LocalServer(path, self._keys.admits)
            self._also_watched.append(self._local.fileno())

    def _open_router(self, context: zmq.Context) -> zmq.Socket[bytes]:
        router = self._open(context, zmq.ROUTER, LONGEST_TO_HUB)
        router.router_handover = True  # a process that was cut off connects again under its name
        router.router_mandatory = True  # report that a peer is gone
        return router

    def _bind(self, socket: zmq.Socket[bytes], domain: bytes, address: str, deadline: float) -> str:
        socket.curve_secretkey = z85.encode(self._keys.private)
        socket.curve_publickey = z85.encode(public_half(self._keys.private))
        socket.curve_server = True
        socket.affinity, socket.zap_domain = _THREADS[domain], domain
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no handshake succeeds while the admission does not answer
        socket.ipv6 = "[" in address
        while True:
            try:
                socket.bind(address)
                return socket.get_string(zmq.LAST_ENDPOINT)
            except zmq.ZMQError as error:
                if time.monotonic() >= deadline:
                    self.close()
                    raise ValueError(f"cannot listen on {address}: {error.strerror}; choose a free port") from error
            time.sleep(RECONNECT_MS / 1e3)

    def close(self) -> None:
        """Waits for a thread that receives or sends: to close a socket that another thread uses ends the process. What
        that thread calls next raises ZMQError."""
        _NEAR_HUBS.pop((os.getpid(), self.address), None)
        if self._near is not None:  # before the address is free: a successor sets its own
            self._near.wake = lambda: None
        self._is_closing = True  # or a thread that calls again and again would have the sockets again before this one
        with self._in_use:
            if self._local is not None:
                self._local.close(codec.LINGER_MS)
            self._guard.close()
            super().close()
        self._woken.close()
        self._wakes.close()

    def limit_clients(self, longest: int) -> None:
        """The longest record of a client has so many bytes."""
        self._longest_of_client = longest
        self._guard.most_waiting = client_limits.MOST_WAITING_BYTES + 2 * longest

    def admit_clients(self, clients: Mapping[bytes, str]) -> None:
        """Admit these clients, by the public halves of their keys, and no other ones: their connections are closed."""
        gone = self._admission.admit_clients(clients)
        for link in [link for link in [*self._names] if peer_of(link) in gone]:
            self._names.pop(link, None)

    def identities(self) -> list[str]:
        """The links that have sent a record, and were connected when they were last sent one."""
        others = [one for one in (self._near, self._local) if one is not None]
        return [*self._names, *(name for other in others for name in other.identities)]

    def wake(self) -> None:
        """Make `receive` return, from any thread: with None, now or when it is called next, or with a record."""
        self._is_called = True
        self._end_wait()

    def _end_wait(self) -> None:
        """The thread that waits for a record looks for what else there is to do."""
        with contextlib.suppress(OSError):  # so many are unread that another says nothing more, or the hub is closed
            self._wakes.send(b"\0")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """While it lasts no record is handled where it is sent; those that come meanwhile are handled at its end."""
        if self._near is None:
            yield
            return
        with self._near.turn:
            yield
        self._near.serve_waiting()

    def serve_near(self, handle: Handle | None) -> None:
        """Let records of this process be handled by the threads that send them; what `handle` raises, `receive` does.
        With None they are received."""
        if self._near is not None:
            self._near.serve_with(handle)

    def send(self, identities: Sequence[str], record: Any) -> None:
        """Multicast one record, to other processes encoded once. Never blocks.

        It is lost for an identity that is not connected, or that has not read its last `MOST_QUEUED` records, a client
        also with `client_limits.MOST_QUEUED_BYTES` waiting for it.
        """
        far = identities if self._near is None else self._near.put(identities, record)
        if far:
            payload = CODEC.encode(record)
            if self._local is not None:
                local = self._local
                far = [identity for identity in far if not local.send(identity, payload)]
            self._unsent.extend([(identity, payload) for identity in far])
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send, unless another thread uses the sockets: it does so when it is done, or woken from its wait."""
        while self._unsent:
            if not self._in_use.acquire(blocking=False):
                self._end_wait()
                return
            try:
                while self._unsent:
                    self._post(*self._unsent.popleft())
            finally:
                self._in_use.release()

    def _post(self, identity: str, payload: bytes) -> None:
        socket = self._names.get(identity, self._socket)
        if socket is self._client_socket and not self._guard.takes(identity, len(payload)):
            return
        try:
            socket.send(identity.encode(), zmq.SNDMORE | zmq.NOBLOCK)
            socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._names.pop(identity, None)

    def receive(self, timeout_s: float | None = None) -> tuple[str, Any] | None:
        """The next (identity, record), or None after `timeout_s` or once woken. Unreadable records are counted and
        skipped. Raises what `serve_near` has raised."""
        if (received := self._take()) is not None:
            return received
        for socket, (name, *payload) in self._messages(timeout_s):
            identity = name.bytes.decode(errors="replace")
            peer = self._admission.peer(str(name.get("User-Id")))
            self._meter.begin(peer)
            try:
                record = self._read(socket, identity, peer, payload)
            except CodecError as error:
                self.refuse(peer or identity, error)
                continue
            self._names[identity] = socket
            return identity, record
        return self._take()

    def _take(self) -> tuple[str, Any] | None:
        """The next record of a thread of this process, or of another process of this machine."""
        self._meter.settle()
        if self._near is not None and (record := self._near.take()) is not None:
            return record
        taken, self._taken = self._taken or self._take_local(), None
        return taken

    def _take_local(self) -> tuple[str, Any] | None:
        while self._local is not None and (arrived := self._local.receive()) is not None:
            identity, payload = arrived
            try:
                return identity, CODEC.decode(payload)
            except CodecError as error:
                self.refuse(peer_of(identity), error)
        return None

    def _has_taken(self) -> bool:
        """Whether `_take` has something."""
        self._taken = self._taken or self._take_local()
        return self._taken is not None or (self._near is not None and self._near.has_left)

    def _next_message(self, timeout_s: float | None) -> tuple[zmq.Socket[bytes], list[zmq.Frame]] | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._is_closing:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        while True:
            message = super()._next_message(timeout_s)
            if message is None and self._woken.fileno() in self._ended_by:
                self._woken.recv(1 << 12)
            self._send_waiting()
            if message is not None:
                return message  # it may be unreadable, so a call is still to be answered
            if self._is_called or self._has_taken():
                self._is_called = False
                return None
            if deadline is not None and (timeout_s := deadline - time.monotonic()) <= 0:
                return None

    def _wait(self, timeout_s: float | None, num_sockets: int | None = None) -> zmq.Socket[bytes] | None:
        """Clients, whose socket was opened first, are not read until they may take time again."""
        self._meter.settle()
        if self._guard.has_left and not int(self._client_socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._guard.forget_closed()
        if pause_s := self._meter.pause_s():
            is_rest = timeout_s is not None and timeout_s <= pause_s
            socket = super()._wait(timeout_s if is_rest else pause_s, len(self._watched) - 1)
            if socket is not None or is_rest or self._ended_by:
                return socket
            timeout_s = timeout_s and timeout_s - pause_s
        return super()._wait(timeout_s, num_sockets)

    def _read(self, socket: zmq.Socket[bytes], identity: str, peer: str, payload: list[zmq.Frame]) -> Any:
        """The record of a message, of which sender and size are looked at first."""
        is_own_name = peer_of(identity) == peer
        if socket is self._client_socket:
            self._guard.count_read(identity if is_own_name else peer, payload)
        if not peer:
            raise CodecError("this client is no longer admitted")
        if not is_own_name:
            raise CodecError(f"{identity} is not a name of this peer")
        if is_client(peer):
            self._check_cost(peer, sum(map(len, payload)))
        if len(payload) != 1:
            raise CodecError(f"a record has one frame, not {len(payload)}")
        return CODEC.decode(payload[0].buffer)

    def _check_cost(self, client: str, size: int) -> None:
        if self._meter.is_overspent(client):
            raise CodecError(f"its records take more than {work_meter.KEY_SHARE:.1%} of the coordinator's time")
        if size > self._longest_of_client:
            raise CodecError(f"{size} bytes are more than the {self._longest_of_client} of the longest request")


class Link(_Endpoint):
    """The end of a rank or a client, known to the hub as `identity`, a name of the key's peer. Use from one thread at a
    time.

    It connects again whenever the hub is gone, or not there yet; records sent meanwhile arrive then, all of them or, if
    it `keeps` the "newest", only the last one. Raises ValueError for what is not tcp://host:port.
    """

    def __init__(self, address: str, identity: str, key: LinkKey, *, keeps: str = "all") -> None:
        super().__init__()
        # A context that is collected before its sockets waits for them for ever, and this process with it.
        weakref.finalize(self, _close, self._context, self._watched).atexit = False
        self._endpoint = address
        self._socket = self._open(self._context, zmq.DEALER, LONGEST_TO_LINK)
        self.identity = identity
        self._socket.identity = identity.encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = z85.encode(key.public), z85.encode(key.private)
        self._socket.curve_serverkey = z85.encode(key.hub)
        self._socket.conflate = keeps == "newest"
        self._socket.reconnect_ivl = RECONNECT_MS
        self._socket.connect_timeout = CONNECT_MS
        self._socket.heartbeat_ivl = BEAT_MS
        self._socket.heartbeat_timeout = self._socket.heartbeat_ttl = GIVE_UP_MS
        self._socket.ipv6 = "[" in address
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{address}: not an address of the form tcp://HOST:PORT ({error.strerror})") from error

    def send(self, record: Any) -> None:
        """Never blocks. A record that was on its way to a hub that died is lost."""
        self._post(CODEC.encode(record))

    def _post(self, payload: bytes) -> None:
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            self._reopen_if_broken()
            with contextlib.suppress(zmq.Again):
                self._socket.send(payload, zmq.NOBLOCK)

    def _reopen_if_broken(self) -> None:
        """ZeroMQ gives a connection up for good if its bytes were changed on their way: the socket takes no record."""
        if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def receive(self, timeout_s: float | None = None) -> Any | None:
        """The next record, or None after `timeout_s`. Unreadable ones are counted and skipped."""
        for _, message in self._messages(timeout_s):
            try:
                return CODEC.decode(b"".join([frame.bytes for frame in message]))
            except CodecError as error:
                self.refuse("the hub", error)
        self._reopen_if_broken()
        return None

    def is_refused(self, timeout_s: float, num_times: int = 1) -> bool:
        """Whether attempts to connect that end within `timeout_s` fail in the handshake: one because the key is not
        admitted, or so many, since it is another hub's. A single one may also have taken too long."""
        deadline = time.monotonic() + timeout_s
        failures = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        failures |= zmq.EVENT_HANDSHAKE_FAILED_AUTH
        # an address of its own: that of the monitor before may still be in use
        with self._socket.get_monitor_socket(failures, f"inproc://refusals-{next(_MONITORS)}") as monitor:
            try:
                while num_times:
                    if monitor.poll(_REFUSAL_POLL_MS):
                        num_times -= 1
                        if parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                            break
                    elif time.monotonic() >= deadline:
                        return False
                    self._reopen_if_broken()  # it may have been refused before the monitor was there
                return True
            finally:
                self._socket.disable_monitor()


AnyLink: TypeAlias = "Link | NearLink | LocalLink"


def open_link(
    address: str,
    identity: str,
    key: LinkKey,
    *,
    keeps: str = "all",
    folder: str = "",
    may_wait: Callable[[Any], bool] | None = None,
) -> AnyLink:
    """A link to the hub at this address; one that hands records over, if that hub is `near` and of this process, or
    over a Unix socket, if the hub listens in this `folder` of this machine. Where records are handed over, those that
    `may_wait` do not wake the thread that receives."""
    exchange, admission = _NEAR_HUBS.get((os.getpid(), address), (None, None))
    if exchange is not None and admission is not None and admission.admits(key.public, identity):
        return NearLink(exchange, identity, may_wait)
    local = _local_link(folder, address, identity, key) if folder and keeps == "all" else None
    return Link(address, identity, key, keeps=keeps) if local is None else local


def _local_link(folder: str, address: str, identity: str, key: LinkKey) -> LocalLink | None:
    from actors.transport.local import LocalLink, socket_path  # for processes of one machine alone

    if path := socket_path(folder, address, key.hub):
        with contextlib.suppress(OSError):
            return LocalLink(path, identity, key)
    return None
