"""Which keys a hub admits, as which peers: the handler of ZAP (RFC 27), by which ZeroMQ asks during each handshake.

Ranks and the owner are admitted at one port and clients at another, so that no client can take the name of a rank away
from it. Clients can be added and taken away at any time. Knows neither records nor how the hub is reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import zmq

from actors.transport.keys import HubKeys, is_client, peer_of
from actors.transport.token_bucket import TokenBucket

RANKS = b"ranks"
"""ZAP's domain of the port of ranks and the owner."""
CLIENTS = b"clients"
_ADDRESS = "inproc://zeromq.zap.01"
CONNECTS_PER_S = 1.0
"""Connections that the clients with one key may make."""
CONNECTS_BURST = 64
"""Connections that they may make at once: each client makes two."""


class Admission:
    """The admitted keys; asked by the hub's thread, and by the one that calls `answer`."""

    def __init__(self, context: zmq.Context, keys: HubKeys) -> None:
        admitted = {keys.of(peer).public.hex(): peer for peer in keys.admitted}
        self._ranks = {key: peer for key, peer in admitted.items() if not is_client(peer)}
        self._clients = {key: peer for key, peer in admitted.items() if is_client(peer)}
        self._connects: dict[str, TokenBucket] = {}
        self.asked: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        """Readable when `answer` has something to answer."""
        self.asked.linger = 0
        self.asked.bind(_ADDRESS)

    def admit_clients(self, clients: Mapping[bytes, str]) -> set[str]:
        """Admit these clients, by the public halves of their keys, and no other ones from now on. Returns the clients
        whose key was taken away, be it for another one."""
        before, self._clients = self._clients, {public.hex(): peer for public, peer in clients.items()}
        return {peer for key, peer in before.items() if self._clients.get(key) != peer}

    def admits(self, public: bytes, link: str) -> bool:
        """Whether a link of this name may have this key."""
        return peer_of(link) == self.peer(public.hex())

    def peer(self, user_id: str) -> str:
        """Whose key was shown in the handshake that was answered with this `User-Id`; empty if it was taken away."""
        return self._clients.get(user_id) or self._ranks.get(user_id, "")

    def answer(self, is_full: Callable[[str], bool] = lambda _: False) -> None:
        """One question of ZeroMQ. The key becomes the `User-Id` of each frame of the connection: a name may get another
        key while the connection lasts. That of a client which connects too often, or of which too much waits to be
        read (`is_full`), is not answered: its handshake ends after `HANDSHAKE_MS`, where a refusal would end it, and
        begin the next one, at once."""
        *envelope, version, number, domain, _, _, mechanism, key = self.asked.recv_multipart()
        status, user = (b"400", b"this key is not admitted"), key.hex()
        peer = (self._clients if domain == CLIENTS else self._ranks).get(user)  # it may be taken away meanwhile
        if mechanism == b"CURVE" and peer is not None:
            status = (b"200", b"OK")
            if domain == CLIENTS and (is_full(user) or not self._may_connect(peer)):
                return
        self.asked.send_multipart([*envelope, version, number, *status, user.encode(), b""])

    def _may_connect(self, client: str) -> bool:
        now = time.monotonic()
        bucket = self._connects.setdefault(client, TokenBucket(CONNECTS_PER_S, CONNECTS_BURST, now))
        if bucket.wait_s(now):
            return False
        bucket.spend(1)
        return True
