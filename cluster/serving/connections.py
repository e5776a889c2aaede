"""Connections of clients, and what one may hold of the server while it asks for nothing or does not read its answer.

uvicorn bounds none of that. It must not know what requests say.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_S = 30.0
"""Seconds in which a connection has to send the head of a request."""
_MOST_UNREAD = 1 << 16
"""Bytes that may come, give or take one read, without a head that ends or a part of a body, as lines of a head do: the
parser keeps them."""
_MOST_CHUNKS = 1 << 16
"""Parts of one chunked body: each costs as much as a kilobyte, however short it is."""
_WRITE_S = 60.0
"""Seconds for which a client may read nothing while a part of its answer waits."""


class ConnectionLimit:
    """The connections of one server, at most `most`. Beyond that the one goes that has asked for nothing for longest,
    or, if all have asked, the newest of the address that has the most, so that no address keeps others out."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.idle: dict[BoundedConnection, None] = {}
        self._by_address: defaultdict[str, dict[BoundedConnection, None]] = defaultdict(dict)

    def add(self, new: BoundedConnection) -> None:
        self._by_address[new.address][new] = None
        if sum(map(len, self._by_address.values())) > self.most:
            gone = next(iter(self.idle), None) or next(reversed(max(self._by_address.values(), key=len)))
            self.remove(gone)
            gone.transport.abort()
        if not new.transport.is_closing():
            self.idle[new] = None

    def remove(self, one: BoundedConnection) -> None:
        self.idle.pop(one, None)
        alike = self._by_address.get(one.address, {})
        alike.pop(one, None)
        if not alike:
            self._by_address.pop(one.address, None)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with these bounds."""

    def __init__(self, limit: ConnectionLimit, **options: Any) -> None:
        super().__init__(**options)
        self._limit = limit
        self.address = ""
        """Where the client is; a proxy's address for all clients behind it."""
        self._num_unread = self._num_chunks = 0
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._limit.add(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._limit.remove(self)
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._reading is None and self in self._limit.idle:
            self._await_head()
        self._num_unread += len(data)
        super().data_received(data)
        if (self._num_unread > _MOST_UNREAD or self._num_chunks > _MOST_CHUNKS) and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        self._num_unread = self._num_chunks = 0
        self._limit.idle.pop(self, None)
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._num_chunks += 1

    def on_body(self, body: bytes) -> None:
        self._num_unread = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._limit.idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(_WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def _refuse(self) -> None:
        if self in self._limit.idle:
            self.send_400_response("The head of the request is too long.")
        else:
            self.transport.abort()

    def _await_head(self) -> None:
        self._reading = self.loop.call_later(_HEAD_S, self.transport.abort)
