"""Which client submitted which request, under which number, and which clients are gone.

A client has two links to the hub: it receives on `client` or `client:NAME` and sends on the same name with `/out`, so
that threads which submit do not wait for the one that receives. `client` is the owner of the engine, which ends the
engine when it leaves; any other client may leave at any time, and its requests are aborted `ABSENT_S` later. Every
client numbers its requests as it likes: here each gets a number of the coordinator's own, by which the roles know it,
so that no client can take a number of another. Clients that connect with one key share its quota and its turns, so that
further connections give nothing. Knows nothing of rounds.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from hashlib import blake2b

from actors.protocol.messages import SCOPE_BYTES, Request
from actors.transport.channel import Hub
from actors.transport.keys import OUT, OWNER, peer_of

CLIENT = OWNER
"""Name of the client that started the ranks, and of the link on which it receives."""
ABSENT_S = 5.0
"""Seconds without a connection after which a client is given up; a link reconnects within milliseconds."""
MOST_IN_FLIGHT = 10_000
"""Requests that the clients with one key may have at a time."""
MOST_OF_OWNER = 100_000
"""The same for the owner, whose jobs submit all their prompts at once."""
MOST_TOKENS = 1 << 23
"""Tokens that came with their requests in flight, the owner's excepted: about 300 MB at the coordinator."""
_REMEDY = "submit this one again once some have ended"


def scope_of(client: str) -> int:
    """The scope of the clients with the same key: the same at every coordinator, and 0 for the owner."""
    peer = peer_of(client)
    return 0 if peer == CLIENT else int.from_bytes(blake2b(peer.encode(), digest_size=SCOPE_BYTES).digest())


def num_tokens(request: Request) -> int:
    """Tokens that the coordinator keeps of a request from its arrival on; four that are listed with a token of the
    prompt take the room of one, and so do eight characters of a grammar."""
    listed = 0 if request.prompt_logprobs is None else 1 + request.prompt_logprobs // 4
    written = 0 if request.grammar is None else request.grammar.num_characters // 8
    return (
        len(request.prompt) * (1 + listed)
        + len(request.generated)
        + len(request.source)
        + len(request.reference)
        + written
    )


@dataclass(slots=True)
class InFlight:
    """What the clients with one key have in flight: requests, and the tokens they came with."""

    num_requests: int = 0
    num_tokens: int = 0

    def count(self, request: Request, sign: int) -> None:
        self.num_requests += sign
        self.num_tokens += sign * num_tokens(request)


class Clients:
    """The clients that are connected to `hub`, and the requests of each."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._numbers: dict[str, dict[int, int]] = {}  # here, by client and its own number
        self._in_flight: dict[str, InFlight] = {}  # by peer
        self.origins: dict[int, tuple[str, Request]] = {}
        """The client and its own form of each request in flight, by the number here."""
        self._next_number = itertools.count(1)
        self._absent_since: dict[str, float] = {}

    def connected(self) -> list[str]:
        """Names of the clients, which are those of their receiving links."""
        names = self._hub.identities()
        return [name for name in names if name.partition(":")[0] == CLIENT and not name.endswith(OUT)]

    def number_of(self, link: str, request_id: int) -> int | None:
        """The number here of a request in flight, by that of its client."""
        return self._numbers.get(link.removesuffix(OUT), {}).get(request_id)

    def has_another(self, link: str, request: Request) -> bool:
        """Whether the client has another request in flight under this number, not the same one."""
        number = self.number_of(link, request.request_id)
        if number is None:
            return False
        known = self.origins[number][1]
        return replace(request, generated=known.generated) != known

    def quota_refusal(self, link: str, request: Request) -> str | None:
        """One line why the client has to wait with this request, or None. A repetition is no further request."""
        held, is_owner = self._in_flight.get(peer_of(link), InFlight()), link.removesuffix(OUT) == CLIENT
        most = MOST_OF_OWNER if is_owner else MOST_IN_FLIGHT
        if self.number_of(link, request.request_id) is not None:
            return None
        if held.num_requests >= most:
            return f"this client has {most} requests in flight: {_REMEDY}"
        if not is_owner and held.num_requests and held.num_tokens + num_tokens(request) > MOST_TOKENS:
            return f"this client's requests in flight have prompts of {held.num_tokens} tokens: {_REMEDY}"
        return None

    def admit(self, link: str, request: Request) -> Request:
        """The request under its number here and in the scope of its client; it may be there already."""
        client = link.removesuffix(OUT)
        number = self.number_of(link, request.request_id)
        if number is None:
            number = self._numbers.setdefault(client, {})[request.request_id] = next(self._next_number)
            self.origins[number] = client, request
            self._in_flight.setdefault(peer_of(client), InFlight()).count(request, +1)
        return replace(request, request_id=number, scope=scope_of(client))

    def abandoned(self, now: float) -> list[int]:
        """Numbers here of the requests of clients that have been away for `ABSENT_S` by `now`, a monotonic clock."""
        away = set(self._numbers).difference(self.connected(), [CLIENT])
        self._absent_since = {client: self._absent_since.get(client, now) for client in away}
        gone = [client for client, since in self._absent_since.items() if now - since >= ABSENT_S]
        return [number for client in gone for number in self._numbers[client].values()]

    def forget(self, number: int) -> None:
        """The request has been sent its last tokens."""
        client, request = self.origins.pop(number)
        del self._numbers[client][request.request_id]
        if not self._numbers[client]:
            del self._numbers[client]
        held = self._in_flight[peer_of(client)]
        held.count(request, -1)
        if not held.num_requests:
            del self._in_flight[peer_of(client)]
