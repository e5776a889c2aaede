"""Which client submitted which request, and which clients are gone.

A client has two links to the hub: it receives on `client` or `client:NAME` and sends on the same name with `/out`, so
that threads which submit do not wait for the one that receives. `client` is the owner of the engine, which ends the
engine when it leaves; any other client may leave at any time, and its requests are aborted `ABSENT_S` later. Knows
nothing of rounds.
"""

from __future__ import annotations

from actors.protocol.messages import Report, ReportOrder, Request, Tokens
from actors.transport.channel import Hub

CLIENT = "client"
"""Name of the client that started the ranks, and of the link on which it receives."""
OUT = "/out"
ABSENT_S = 5.0
"""Seconds without a connection after which a client is given up; a link reconnects within milliseconds."""


class Clients:
    """The clients that are connected to `hub`, and the requests of each."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._client_of: dict[int, str] = {}
        self._report_to = CLIENT
        self._absent_since: dict[str, float] = {}

    def connected(self) -> list[str]:
        """Names of the clients, which are those of their receiving links."""
        names = self._hub.identities()
        return [name for name in names if name.partition(":")[0] == CLIENT and not name.endswith(OUT)]

    def owner(self, request_id: int) -> str | None:
        """The client of a request in flight."""
        return self._client_of.get(request_id)

    def num_requests(self, client: str) -> int:
        """Requests of this client in flight."""
        return sum([owner == client for owner in self._client_of.values()])

    def record_origin(self, link: str, record: Request | ReportOrder) -> None:
        """Send answers to this record to the client of this link from now on."""
        client = link.removesuffix(OUT)
        if isinstance(record, Request):
            self._client_of[record.request_id] = client
        else:
            self._report_to = client

    def client_of(self, answer: Tokens | Report) -> str:
        """The client to send this answer to; the last tokens of a request end its entry."""
        if isinstance(answer, Report):
            return self._report_to
        if answer.finish_reason is not None:
            return self._client_of.pop(answer.request_id, CLIENT)
        return self._client_of.get(answer.request_id, CLIENT)

    def abandoned(self, now: float) -> list[int]:
        """Requests of clients that have been away for `ABSENT_S` by `now`, a monotonic clock; each once."""
        away = set(self._client_of.values()).difference(self.connected(), [CLIENT])
        self._absent_since = {client: self._absent_since.get(client, now) for client in away}
        gone = {client for client, since in self._absent_since.items() if now - since >= ABSENT_S}
        requests = [request_id for request_id, client in self._client_of.items() if client in gone]
        for request_id in requests:
            del self._client_of[request_id]
        return requests
