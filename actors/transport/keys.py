"""Key pairs of the control line, and which names of links a key is for.

The hub has a pair, and so has every peer: each rank, the owner of the engine, each client. Those of the hub, the ranks,
the owner and the first client follow from the secret of the engine, which its launching process and its coordinator
alone have; further clients bring pairs of their own. A peer needs its private half and the hub's public one: its key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

SECRET_BYTES = 32
"""Length of the secret of an engine, and of both halves of a pair."""
PROOF_BYTES = 32
OWNER = "client"
"""The peer that started the engine."""
CLIENTS = "client:"
"""Begins the names of all other clients."""
FIRST_CLIENT = CLIENTS + "default"
"""The client whose key every engine makes."""
OUT = "/out"
"""Ends the name of the link on which a client sends; without it, that is the one on which it receives."""
_TEXT = re.compile(rf"([\w-]{{1,40}})\.([0-9a-f]{{{4 * SECRET_BYTES}}})", re.ASCII)


def is_client(link: str) -> bool:
    """Whether this is the name of a link of a client, other than the owner of the engine."""
    return link.startswith(CLIENTS)


def peer_of(link: str) -> str:
    """The peer that a link belongs to: target-0 of target-0#1/heart, client:alice of client:alice:5f/out."""
    name = link.partition("/")[0]
    return ":".join(name.split(":", 2)[:2]) if is_client(name) else name.partition("#")[0]


def public_half(private: bytes) -> bytes:
    return z85.decode(zmq.curve_public(z85.encode(private)))


@dataclass(frozen=True, slots=True)
class LinkKey:
    """What `peer` needs to connect: the hub's public half and its own private one."""

    peer: str
    hub: bytes
    private: bytes = field(repr=False)

    @property
    def public(self) -> bytes:
        return public_half(self.private)

    def proof(self, link: str) -> bytes:
        """Shows a hub on the same machine that this peer opens a link of this name."""
        return hashlib.blake2b(f"link {link}".encode(), key=self.private, digest_size=PROOF_BYTES).digest()

    @property
    def text(self) -> str:
        """A client's key as one word: what `read` takes."""
        return f"{self.peer.removeprefix(CLIENTS)}.{(self.hub + self.private).hex()}"

    @staticmethod
    def read(text: str) -> LinkKey:
        """ValueError if it is not the key of a client."""
        if (found := _TEXT.fullmatch(text.strip())) is None:
            raise ValueError("not a key")
        halves = bytes.fromhex(found[2])
        return LinkKey(CLIENTS + found[1], halves[:SECRET_BYTES], halves[SECRET_BYTES:])

    @staticmethod
    def made_for(name: str, hub: bytes) -> LinkKey:
        """A new key for a client of this name."""
        return LinkKey(CLIENTS + name, hub, secrets.token_bytes(SECRET_BYTES))


@dataclass(frozen=True, slots=True)
class HubKeys:
    """The keys of one engine, whose ranks are `peers`."""

    secret: bytes = field(repr=False)
    peers: tuple[str, ...] = ()

    @property
    def private(self) -> bytes:
        """The hub's own half."""
        return self._derive("hub")

    @property
    def admitted(self) -> tuple[str, ...]:
        """The peers that are admitted from the start."""
        return (*self.peers, OWNER, FIRST_CLIENT)

    def of(self, peer: str) -> LinkKey:
        """The key of a rank, the owner or the first client."""
        return LinkKey(peer, public_half(self.private), self._derive(f"peer {peer}"))

    def admits(self, link: str, proof: bytes) -> bool:
        """Whether this proof is that of a rank or the owner for a link of this name."""
        peer = peer_of(link)
        is_known = peer in (*self.peers, OWNER) and not is_client(peer)
        return is_known and hmac.compare_digest(self.of(peer).proof(link), proof)

    def _derive(self, purpose: str) -> bytes:
        return hashlib.blake2b(purpose.encode(), key=self.secret, digest_size=SECRET_BYTES).digest()
