"""Answers that last: each ends early when its client disconnects, or when its time is over.

It must not know what the answers say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.completion import EngineError
from cluster.serving.errors import Disconnected, body_of, engine_failure, timed_out

T = TypeVar("T")


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects first: then raises `Disconnected`."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Disconnected
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, as they are made. An error after the first is an event itself. `close` is called in the end,
    however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], None], timeout_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(Disconnected):
                await while_connected(receive, self._send_all(send, scope["state"]["send"]))
        finally:
            self._close()

    async def _send_all(self, start: Send, send: Send) -> None:
        """What lies around the application is for how a reply begins: the parts, many, go by it to the server."""
        await start({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(self._timeout_s), contextlib.aclosing(self._events) as events:
                async for event in events:
                    await _send_part(send, event)
        except TimeoutError:
            await _send_part(send, _failure(timed_out(self._timeout_s)))
        except EngineError as error:
            await _send_part(send, _failure(engine_failure(error)))
        await _send_part(send, b"", is_last=True)


async def _send_part(send: Send, body: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _failure(error: HTTPException) -> bytes:
    return b"data: " + body_of(error) + b"\n\n"
