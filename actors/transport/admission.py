"""Which keys a hub admits, as which peers: the handler of ZAP (RFC 27), by which ZeroMQ asks during each handshake.

Ranks and the owner are admitted at one port and clients at another, so that no client can take the name of a rank away
from it. Clients can be added and taken away at any time. Knows neither records nor how the hub is reached.
"""

from __future__ import annotations

from collections.abc import Mapping

import zmq

from actors.transport.keys import HubKeys, is_client, peer_of

RANKS = b"ranks"
"""ZAP's domain of the port of ranks and the owner."""
CLIENTS = b"clients"
_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Admission:
    """The admitted keys; asked by the hub's thread, and by the one that calls `answer`."""

    def __init__(self, context: zmq.Context, keys: HubKeys) -> None:
        admitted = {keys.of(peer).public.hex(): peer for peer in keys.admitted}
        self._ranks = {key: peer for key, peer in admitted.items() if not is_client(peer)}
        self._clients = {key: peer for key, peer in admitted.items() if is_client(peer)}
        self.asked: zmq.Socket[bytes] = context.socket(zmq.REP)
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

    def near_peer(self, link: str) -> str:
        """The peer of a link in this process, where no handshake shows a key; empty if it was taken away."""
        peer = peer_of(link)
        return peer if not is_client(peer) or peer in self._clients.values() else ""

    def answer(self) -> None:
        """One question of ZeroMQ. The key becomes the `User-Id` of each frame of the connection: a name may get another
        key while the connection lasts."""
        request = self.asked.recv_multipart()
        key = request[6].hex() if len(request) == 7 and request[5] == b"CURVE" else ""
        is_known = key in (self._clients if request[2] == CLIENTS else self._ranks)
        status = (b"200", b"OK") if is_known else (b"400", b"this key is not admitted")
        self.asked.send_multipart([_VERSION, request[1], *status, key.encode(), b""])
