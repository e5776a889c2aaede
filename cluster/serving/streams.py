"""Answers that last: each ends early when its client disconnects, or when its time is over.

It must not know what the answers say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

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


class FlowState(Protocol):
    """Whether the client reads what it is sent."""

    @property
    def is_full(self) -> bool:
        """Whether `send` waits until the client has read some of what it was sent."""
        ...


class Part(NamedTuple):
    """Events that came to be since the last look. `write` may be called in a thread, and is if it takes long."""

    write: Callable[[], bytes]
    takes_long: bool = False
    is_last: bool = False


class Events(Protocol):
    """What a stream sends."""

    def notify(self, looker: Callable[[], None]) -> None:
        """Call this in this loop whenever there may be something to look at, and once now."""
        ...

    def look(self) -> Part | None:
        """None if nothing came since the last look. Raises EngineError."""
        ...


class EventStream(Response):
    """Server-sent events, as they are made. An error after the first is an event itself. `close` is called in the end,
    however it ends.

    A part is sent in the very call that says it is there: a pass leaves no cache warm for Python, so that each step of
    a task on the way takes tens of microseconds. What has to wait, for the client to read or for a thread, is left to
    the task, and so is every error.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, close: Callable[[], None], timeout_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._timeout_s = timeout_s
        self._due = asyncio.Event()  # the task has something to do
        self._left: Part | None = None  # which was looked at and is left to the task
        self._failure: Exception | None = None
        self._is_waiting = self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(Disconnected):
                await while_connected(receive, self._send_all(send, scope["state"]))
        finally:
            self._close()

    async def _send_all(self, start: Send, state: dict[str, Any]) -> None:
        """What lies around the application is for how a reply begins: the parts, many, go by it to the server."""
        send: Send = state["send"]
        await start({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(self._timeout_s):
                self._events.notify(partial(self._send_at_once, send, state["connection"]))
                while not self._is_over:
                    await self._due.wait()
                    self._due.clear()
                    await self._send_left(send)
        except TimeoutError:
            await self._fail(send, timed_out(self._timeout_s))
        except EngineError as error:
            await self._fail(send, engine_failure(error))

    def _send_at_once(self, send: Send, connection: FlowState) -> None:
        """Called in the loop: sends what came, or lets the task do what has to wait."""
        if self._is_waiting or self._is_over or self._due.is_set() or connection.is_full:
            self._due.set()
            return
        try:
            part = self._events.look()
            if part is None:
                return
            if part.takes_long:
                self._left = part
                self._due.set()
                return
            _run_at_once(_send_part(send, part.write(), is_last=part.is_last))
            if part.is_last:
                self._is_over = True
                self._due.set()
        except Exception as error:
            self._failure = error
            self._due.set()

    async def _send_left(self, send: Send) -> None:
        """Send what was left to the task, and what came meanwhile."""
        if self._failure is not None:
            raise self._failure
        self._is_waiting = True
        while not self._is_over and (part := self._left or self._events.look()) is not None:
            self._left = None
            body = await asyncio.to_thread(part.write) if part.takes_long else part.write()
            await _send_part(send, body, is_last=part.is_last)
            self._is_over = part.is_last
        self._is_waiting = False

    async def _fail(self, send: Send, error: HTTPException) -> None:
        """End with this error, unless the last part went out just before it."""
        if self._is_over:
            return
        self._is_over = True
        await _send_part(send, b"data: " + body_of(error) + b"\n\n", is_last=True)


def _run_at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run what does not wait for anything, outside of a task."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise RuntimeError("the server waits though the connection is not full")


async def _send_part(send: Send, body: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
