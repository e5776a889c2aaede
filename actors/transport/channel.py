"""The control line: records over ZeroMQ between the coordinator and every rank and client.

The coordinator listens with a `Hub`; every rank and client connects with a `Link`. Four one-way records make a round; a
role's records are sent to each of its ranks, so no rank waits for its lead to pass them on. The same code connects
threads, processes and hosts. Carries no tensors and decides nothing; lost records are detected elsewhere
(`actors/coordinator/membership.py`).

Every connection is encrypted and authenticated by CurveZMQ (RFC 26). The key pair of the hub is derived from the
`secret` of the engine, its public half too: that is never sent, and a handshake cannot be begun without it, so the
holders of the secret alone can connect, or answer as the hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import select
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

import zmq
from zmq.utils import z85

from actors.logs import log_event, logger_of
from actors.protocol import membership, messages
from actors.transport.codec import Codec, CodecError

_REQUESTS = (messages.Request, messages.Abort, messages.Tokens, messages.ReportOrder, messages.Report)
_DRAFTS = (messages.DraftBatch, messages.ProposalBatch, messages.DraftPreviewBatch)
_VERDICTS = (messages.VerifyBatch, messages.VerdictBatch)
_PROCESSES = (membership.Alive, membership.RankLost, membership.Silent, membership.Hello, membership.Stop)
_EPOCHS = (membership.Recall, membership.Join, membership.Ready, membership.RoleLost, membership.RoleBack)
CODEC = Codec(_REQUESTS + _DRAFTS + _VERDICTS + _PROCESSES + _EPOCHS)
SECRET_BYTES = 32
"""Length of the secret of an engine."""
LINGER_MS = 200
"""How long `close` may still deliver: enough for a last record, too short to delay an exit."""
RECONNECT_MS = 20
"""Between two attempts of a link to reach a hub that is gone: its successor listens at the same address."""
CONNECT_MS = 1000
"""An unanswered attempt is replaced after so long: TCP itself would retry at growing intervals."""
HANDSHAKE_MS = 2000
"""A connection that is not authenticated by then is closed."""
BEAT_MS = 1000
"""Between two ZMTP heartbeats of a link, which ZeroMQ's own thread sends and answers, however long a pass takes."""
GIVE_UP_MS = 3000
"""Both ends close a connection without traffic for so long: a host that is cut off sends no FIN."""
LONGEST_TO_HUB = 1 << 24
"""Bytes of a frame. Proposals with distributions for a large batch have about a third of it."""
LONGEST_TO_LINK = 1 << 28
"""A report with as many spans as are kept has a few millions."""
MOST_QUEUED = 20_000
"""Records that wait for a peer that does not read; further ones are lost, as for a peer that is gone."""
MOST_REFUSED = 100
"""Invalid records after which a peer is ignored: ZeroMQ does not close the connection of a single peer."""
_SELECT_BELOW_S = 0.01
"""ZeroMQ polls in milliseconds; below this timeout that is too coarse, so `select` waits on its descriptor."""
_FD_SETSIZE = 1024
"""`select` cannot watch descriptors from this number on."""
_WARN_EVERY_S = 5.0


def link_name(identity: str, incarnation: int) -> str:
    """The name of a process's link: successive processes of one rank have different ones."""
    return f"{identity}#{incarnation}"


def _hub_keys(secret: bytes) -> tuple[bytes, bytes]:
    """The hub's public and private key."""
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"specdec hub").digest())
    return zmq.curve_public(private), private


class _Endpoint:
    """What both ends share: one socket in a context of its own, so that `close` waits for what is on its way."""

    def __init__(self, kind: int, longest: int) -> None:
        self.num_unreadable = 0
        self._warned_at = -_WARN_EVERY_S
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.linger = LINGER_MS
        self._socket.sndhwm = MOST_QUEUED
        self._socket.maxmsgsize = longest
        self._socket.handshake_ivl = HANDSHAKE_MS
        self._descriptor: int = self._socket.FD

    def close(self) -> None:
        self._context.destroy(LINGER_MS)

    def _wait(self, timeout_s: float | None) -> bool:
        """Whether a record arrived within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not int(self._socket.EVENTS) & zmq.POLLIN:  # ZeroMQ looks at its descriptor when this is read
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is None or left_s >= _SELECT_BELOW_S or self._descriptor >= _FD_SETSIZE:
                return bool(self._socket.poll(None if left_s is None else ceil(left_s * 1e3)))
            if left_s <= 0:
                return False
            select.select((self._descriptor,), (), (), left_s)
        return True

    def _messages(self, timeout_s: float | None) -> Iterator[list[bytes]]:
        """The parts of each message that arrives within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._wait(timeout_s):
            yield self._socket.recv_multipart()
            if deadline is not None and (timeout_s := deadline - time.monotonic()) <= 0:
                return

    def refuse(self, sender: str, error: Exception) -> None:
        """Count a record that was dropped, and log it unless one was logged just now."""
        self.num_unreadable += 1
        if time.monotonic() - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = time.monotonic()
            facts = {"sender": sender, "so_far": self.num_unreadable, "why": str(error)}
            log_event(logger_of("transport"), "refused", level=logging.WARNING, **facts)


class Hub(_Endpoint):
    """The coordinator's end. `address` is tcp://host:port, port 0 or * for any free one. Use from one thread.

    Raises ValueError if the address is still taken after `bind_wait_s`. Peers are read in turn, so that none that sends
    without pause delays the others.
    """

    def __init__(self, address: str, secret: bytes, bind_wait_s: float = 0.0) -> None:
        super().__init__(zmq.ROUTER, LONGEST_TO_HUB)
        self._socket.curve_publickey, self._socket.curve_secretkey = _hub_keys(secret)
        self._socket.curve_server = True
        self._socket.router_handover = True  # a process that was cut off connects again under its name
        self._socket.router_mandatory = True  # report that a peer is gone
        self._socket.ipv6 = "[" in address
        self._names: set[str] = set()
        self._num_refused: Counter[str] = Counter()
        deadline = time.monotonic() + bind_wait_s
        while True:
            try:
                self._socket.bind(address)
                break
            except zmq.ZMQError as error:
                if time.monotonic() >= deadline:
                    self.close()
                    raise ValueError(f"cannot listen on {address}: {error.strerror}; choose a free port") from error
            time.sleep(RECONNECT_MS / 1e3)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)

    def identities(self) -> list[str]:
        """Of the links that have sent a record and were connected when they were last sent one."""
        return list(self._names)

    def send(self, identities: Sequence[str], record: Any) -> None:
        """Multicast one record, encoded once. Never blocks.

        It is lost for an identity that is not connected, or that has not read its last `MOST_QUEUED` records.
        """
        payload = CODEC.encode(record)
        for identity in identities:
            self._post(identity, payload)

    def _post(self, identity: str, payload: bytes) -> None:
        try:
            self._socket.send_multipart((identity.encode(), payload), zmq.NOBLOCK)
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._names.discard(identity)

    def receive(self, timeout_s: float | None = None) -> tuple[str, Any] | None:
        """The next (identity, record), or None after `timeout_s`. Unreadable records are counted and skipped."""
        for name, *payload in self._messages(timeout_s):
            identity = name.decode(errors="replace")
            if self._num_refused[identity] >= MOST_REFUSED:
                continue
            try:
                record = CODEC.decode(b"".join(payload))
            except CodecError as error:
                self.refuse(identity, error)
                continue
            self._names.add(identity)
            return identity, record
        return None

    def refuse(self, sender: str, error: Exception) -> None:
        """Also drop whatever `sender` sends from its `MOST_REFUSED`th such record on, unread."""
        self._num_refused[sender] += 1
        super().refuse(sender, error)


class Link(_Endpoint):
    """The end of a rank or a client, known to the hub as `identity`. Use from one thread at a time.

    It connects again whenever the hub is gone, or not there yet; records sent meanwhile arrive then, all of them or, if
    it `keeps` the "newest", only the last one. Raises ValueError for what is not tcp://host:port.
    """

    def __init__(self, address: str, identity: str, secret: bytes, *, keeps: str = "all") -> None:
        super().__init__(zmq.DEALER, LONGEST_TO_LINK)
        self.identity = identity
        self._socket.identity = identity.encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_serverkey = _hub_keys(secret)[0]
        self._socket.conflate = keeps == "newest"
        self._socket.reconnect_ivl = RECONNECT_MS
        self._socket.connect_timeout = CONNECT_MS
        self._socket.heartbeat_ivl = BEAT_MS
        self._socket.heartbeat_timeout = self._socket.heartbeat_ttl = GIVE_UP_MS
        self._socket.ipv6 = "[" in address
        self._address = address
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{address}: not an address of the form tcp://HOST:PORT ({error.strerror})") from error

    def send(self, record: Any) -> None:
        """Never blocks. A record that was on its way to a hub that died is lost."""
        self._post(CODEC.encode(record))

    def _post(self, payload: bytes) -> None:
        self._reopen_if_broken()
        with contextlib.suppress(zmq.Again):
            self._socket.send(payload, zmq.NOBLOCK)

    def _reopen_if_broken(self) -> None:
        """ZeroMQ gives a connection up for good if its bytes were changed on their way: the socket takes no record."""
        if not int(self._socket.EVENTS) & zmq.POLLOUT:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(self._address)
            self._socket.connect(self._address)

    def receive(self, timeout_s: float | None = None) -> Any | None:
        """The next record, or None after `timeout_s`. Unreadable ones are counted and skipped."""
        for message in self._messages(timeout_s):
            try:
                return CODEC.decode(b"".join(message))
            except CodecError as error:
                self.refuse("the hub", error)
        self._reopen_if_broken()
        return None

    def is_refused(self, timeout_s: float) -> bool:
        """Whether an attempt to connect that ends within `timeout_s` fails in the handshake: the secret is another."""
        failures = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        with self._socket.get_monitor_socket(failures) as monitor:
            try:
                return bool(monitor.poll(ceil(timeout_s * 1e3)))
            finally:
                self._socket.disable_monitor()
