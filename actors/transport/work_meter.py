"""Limits the share of the hub's thread that the records of clients take.

A record costs the seconds of the thread that receives, decodes, checks and answers it, whatever it is: no kind of
record is cheap to send and expensive to read. Seconds of a thread do not count what other threads and processes do
meanwhile. Knows no record and no socket.
"""

from __future__ import annotations

import time

from actors.transport.keys import is_client
from actors.transport.token_bucket import TokenBucket

PORT_SHARE = 0.05
"""Share of the hub's thread that the records of all clients may take while ranks and the owner use it."""
PORT_BURST_S = 0.005
"""Seconds of it that they may take at once, after a pause."""
PORT_TURN_S = 0.001
"""A pause lasts until so much may be taken: to wake up for every record would cost more than to read it."""
KEY_SHARE = 0.025
"""The same for the clients with one key: above it their records are dropped unread, which costs the others less time
than to read them, until they send less."""
KEY_BURST_S = 0.5
"""Seconds that they may take at once: for about 3,000 requests."""
RECEIVE_S = 2e-5
"""What a record costs before it is in the hands of the hub."""


class WorkMeter:
    """Charges the work for each record of a client to the port of clients and to the client's key. Used by the thread
    that receives."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._port = TokenBucket(PORT_SHARE, PORT_BURST_S, now)
        self._keys: dict[str, TokenBucket] = {}
        self._client = ""
        self._began_at = self._resume_at = 0.0

    def begin(self, peer: str) -> None:
        """A record of this peer has been received."""
        if is_client(peer):
            self._client, self._began_at = peer, time.thread_time()

    def settle(self) -> None:
        """All work for the last record is over. The thread that calls may be the successor of the one that began."""
        if self._client:
            work_s, now = max(0.0, time.thread_time() - self._began_at) + RECEIVE_S, time.monotonic()
            self._key(self._client).spend(work_s)
            self._port.spend(work_s)
            if self._port.wait_s(now):
                self._resume_at = now + self._port.wait_s(now, PORT_TURN_S)
            self._client = ""

    def pause_s(self) -> float:
        """Seconds for which the port of clients is not read."""
        return max(0.0, self._resume_at - time.monotonic())

    def is_overspent(self, client: str) -> bool:
        return self._key(client).wait_s(time.monotonic()) > 0

    def _key(self, client: str) -> TokenBucket:
        if (bucket := self._keys.get(client)) is None:
            bucket = self._keys[client] = TokenBucket(KEY_SHARE, KEY_BURST_S, time.monotonic())
        return bucket
