"""What happens to a request before it is read: its number, its path, its key, the size of its body, and whether a page
in a browser may send it.

ASGI around the application. It must not know routes, but for those that need no key.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.serving.errors import ApiError, answer, too_many
from cluster.serving.replies import random_id

OPEN = ("/", "/health")
"""Paths that need no key: the page asks for one, and says nothing of the engine."""
_REQUEST_ID = "x-request-id"
_NAMED = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_BEARER = "bearer "
_MOST_ARRIVING = 16
"""Bodies of the largest size that may arrive at a time. Beyond that only small ones are taken."""
_SMALL = 1 << 16


def open_to_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, which browsers let pages of these origins use ("*": any page). A browser asks before it sends a page's
    request, without a key; it sends no cookies, since none mean anything here."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),  # clients add headers of their own
        expose_headers=(_REQUEST_ID, "retry-after", "x-should-retry"),
    )


class Guard:
    """Around `app`: replies carry the request's X-Request-Id or one made here, which `scope["state"]` holds too, beside
    the server's own `send`. A path may end with a slash."""

    def __init__(self, app: ASGIApp, keys: Collection[str], max_body: int) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_body = max_body
        self._arriving = 0  # bytes of bodies that have not come to their end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(_REQUEST_ID, "")
        request_id = given if _NAMED.fullmatch(given) else random_id()
        scope.setdefault("state", {}).update(request_id=request_id, send=send)

        async def send_numbered(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID] = request_id
            await send(message)

        path = _without_slash(scope["path"])
        if (refusal := self._refusal(path, headers)) is not None:
            await answer(refusal)(scope, receive, send_numbered)
        else:
            body = _ArrivingBody(self, receive)
            try:
                await self._app({**scope, "path": path}, body.receive, send_numbered)
            finally:
                body.end()

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if path not in OPEN and not self._admits(headers.get("authorization", "")):
            line = "no valid API key; send it as `Authorization: Bearer KEY`"
            return ApiError(401, line, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        return self._too_large() if not length.isdecimal() or int(length) > self._max_body else None

    def _admits(self, authorization: str) -> bool:
        if not self._keys:
            return True
        key = authorization[len(_BEARER) :] if authorization.lower().startswith(_BEARER) else ""
        matches = [
            hmac.compare_digest(key.encode(), known) for known in self._keys
        ]  # all of them: the time says nothing
        return True in matches

    def check_body(self, size: int, more: int) -> None:
        """So many bytes of one body have come, `more` of them now. Raises ApiError if they are too many."""
        self._arriving += more
        if size > self._max_body:
            raise self._too_large()
        if size > _SMALL and self._arriving > _MOST_ARRIVING * self._max_body:
            raise too_many("large bodies of many requests are arriving; try again later")

    def forget_body(self, size: int) -> None:
        """They have come to their end."""
        self._arriving -= size

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body has more than {self._max_body} bytes (server.max_body_mb)", code="body_too_large"
        )


class _ArrivingBody:
    """The body of a request, which `guard` limits whether it says its length or not."""

    def __init__(self, guard: Guard, receive: Receive) -> None:
        self._guard = guard
        self._receive = receive
        self._size = 0

    async def receive(self) -> Message:
        message = await self._receive()
        more = len(message.get("body", b""))
        self._size += more
        self._guard.check_body(self._size, more)
        if not message.get("more_body", False):
            self.end()
        return message

    def end(self) -> None:
        self._guard.forget_body(self._size)
        self._size = 0


def _without_slash(path: str) -> str:
    """The path without a slash at its end, unless it has nothing but slashes."""
    shorter = path.removesuffix("/")
    return shorter if shorter.strip("/") else path
