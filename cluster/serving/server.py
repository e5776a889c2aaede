"""The HTTP server: a socket, uvicorn in a thread of its own, and an end that lets running requests finish.

It must not know routes.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import threading
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.serving.connections import BoundedConnection, ConnectionLimit

_BACKLOG = 2048
_END_S = 5
"""Seconds in which connections end once no request is in flight."""
_MOST_CONNECTIONS = 4096


class HttpServer:
    """Answers on the bound socket `listener` from construction to `close`."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._app = app
        self._socket = listener
        listener.listen(_BACKLOG)  # so that a client may connect as soon as this is made
        self.host: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        connection: Any = partial(BoundedConnection, ConnectionLimit(most_connections()))
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self._answer,
                http=connection,
                interface="asgi3",  # it takes a bound method for the older one
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nothing here asks for the client's address
                timeout_graceful_shutdown=_END_S,
            )
        )
        self._thread = threading.Thread(target=self._run, name="http-server", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host) or self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Close the port and the connections. Safe to call twice."""
        self._uvicorn.should_exit = True
        self._thread.join()
        self._socket.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What `close` cuts off is no failure of the application, of which uvicorn would log a trace."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._uvicorn.should_exit:
                raise

    def _run(self) -> None:
        self._uvicorn.run(sockets=[self._socket])  # in the loop of uvloop, if that is installed


def most_connections() -> int:
    """Leaves half of the files that this process may open to the engine."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if files == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, files // 2)


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, which does not listen yet. Raises ValueError, one line, if it is taken or if the host
    is none of this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol by its name, by which asyncio knows that small parts of replies are to be sent without delay
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = "give an address of this machine, as 127.0.0.1, or 0.0.0.0 for all of them"
            raise ValueError(f"server.host={host}: {error.strerror}; {remedy}") from error
        remedy = "choose another port, or 0 for a free one"
        raise ValueError(f"server.port={port}: cannot be had on {host} ({error.strerror}); {remedy}") from error
    return listener
