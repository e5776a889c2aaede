"""What one connection may hold of the server: heads and bodies that never end, answers that are not read, connections
that ask for nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from cluster.serving import bodies, connections, guard
from cluster.serving import server as server_module
from cluster.serving.server import HttpServer, bind, most_connections
from tests.cluster.serving.conftest import KEY, RunningServer, until

ASK = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = (
    f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
).encode()


@contextmanager
def connected(http: HttpServer, sent: bytes = b"", address: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A connection from this address that has sent this."""
    with socket.create_connection((http.host, http.port), 30, (address, 0)) as connection:
        connection.sendall(sent)
        yield connection


def answer(connection: socket.socket) -> bytes:
    """All that is sent until the server closes it."""
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def is_cut(connection: socket.socket, part: bytes, most: int) -> bool:
    """Whether the server ends the connection before it was sent so many bytes of such parts."""
    try:
        for _ in range(most // len(part)):
            connection.sendall(part)
    except OSError:
        return True
    return False


LINE = b"x: " + b"b" * 1000 + b"\r\n"


@pytest.mark.parametrize(
    ("sent", "part"),
    [
        (b"GET /health HTTP/1.1\r\nx: ", b"a" * 1000),
        (b"GET /health HTTP/1.1\r\n", LINE),
        (b"GET /", b"a" * 1000),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", LINE),
        (CHUNKED + b"1;", b"a" * 1000),
        (CHUNKED, b"1\r\n \r\n" * 200),
    ],
    ids=["line of a head", "lines of a head", "path", "trailer", "extension of a chunk", "tiny chunks"],
)
def test_what_has_no_end_is_cut(server: RunningServer, sent, part):
    """The parser keeps it, or takes as long for a byte as for a kilobyte."""
    with connected(server.http, sent) as connection:
        assert is_cut(connection, part, 16 * 2**20)
    assert server.ask("/health")[0] == 200


def test_heads_of_a_usual_size_and_bodies_in_chunks_are_read(server: RunningServer):
    large = ASK[:-2] + b"cookie: " + b"a" * 30_000 + b"\r\n\r\n"
    with connected(server.http) as connection:
        for _ in range(4):
            connection.sendall(large)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        content = b'{"prompt": "a", "max_tokens": 1}' + b" " * 200_000
        connection.sendall(CHUNKED)
        for start in range(0, len(content), 1000):
            connection.sendall(b"3e8\r\n" + content[start : start + 1000].ljust(1000) + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "is_second"), [(b"", False), (b"GET /hea", False), (b"\r\n", True), (b"GET /hea", True)]
)
def test_a_head_has_to_arrive_in_time(server: RunningServer, monkeypatch, sent, is_second):
    monkeypatch.setattr(connections, "_HEAD_S", 0.2)
    with connected(server.http, ASK if is_second else sent) as connection:
        if is_second:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            connection.sendall(sent)
        assert b"HTTP" not in answer(connection)


def test_a_body_has_to_arrive_in_time(server: RunningServer, monkeypatch):
    monkeypatch.setattr(bodies, "_ARRIVE_S", 0.2)
    with connected(server.http, CHUNKED + b"1\r\n{\r\n") as connection:
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 408") and b"did not arrive" in found


def test_large_bodies_are_refused_while_many_arrive(server: RunningServer, monkeypatch):
    """Each is below its own limit."""
    monkeypatch.setattr(guard, "_MOST_ARRIVING", 0.01)
    part = CHUNKED + b"20000\r\n" + b" " * 0x20000 + b"\r\n"
    with connected(server.http, part) as first:
        time.sleep(0.2)  # it has arrived
        with connected(server.http, part) as second:
            assert second.recv(4096).startswith(b"HTTP/1.1 429")
        assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200, "a small one is taken"
        first.sendall(b"0\r\n\r\n")
        assert first.recv(4096).startswith(b"HTTP/1.1 400")
    with connected(server.http, part + b"0\r\n\r\n") as third:
        assert third.recv(4096).startswith(b"HTTP/1.1 400"), "what has come to its end does not count"


def test_an_answer_that_is_not_read_ends(monkeypatch):
    """Its request goes on being served as long as some of it is read."""
    monkeypatch.setattr(connections, "_WRITE_S", 0.3)
    ended = threading.Event()

    async def endless(_scope: object, receive: Callable, send: Callable) -> None:
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"a" * 65536, "more_body": True})
            await asyncio.sleep(0)
        ended.set()

    http = HttpServer(endless, bind("127.0.0.1", 0))
    try:
        with connected(http, ASK) as connection:
            until_s = time.monotonic() + 1.0
            while time.monotonic() < until_s:
                assert connection.recv(1 << 20)
            assert not ended.is_set()
            assert ended.wait(30)
    finally:
        http.close()


def test_of_too_many_connections_those_go_that_ask_for_nothing(monkeypatch):
    monkeypatch.setattr(server_module, "_MOST_CONNECTIONS", 4)
    goes_on = threading.Event()

    async def slow(scope: dict, _receive: object, send: Callable) -> None:
        while scope["path"] == "/slow" and not goes_on.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    http = HttpServer(slow, bind("127.0.0.1", 0))
    try:
        with connected(http, ASK.replace(b"/health", b"/slow")) as busy, connected(http) as idle:
            until(lambda: len(http._uvicorn.server_state.tasks) == 1)
            others = [socket.create_connection((http.host, http.port)) for _ in range(8)]
            assert answer(idle) == b""  # the first that asked for nothing
            others[-1].sendall(ASK)
            assert others[-1].recv(4096).startswith(b"HTTP/1.1 200")
            assert len(http._uvicorn.server_state.connections) <= 4
            for one in others:
                one.close()
            goes_on.set()
            assert busy.recv(4096).startswith(b"HTTP/1.1 200")
    finally:
        http.close()


def test_of_too_many_connections_that_ask_the_newest_goes_of_the_address_with_the_most(monkeypatch):
    monkeypatch.setattr(server_module, "_MOST_CONNECTIONS", 4)
    begun = list[str]()

    async def slow(scope: dict, _receive: object, send: Callable) -> None:
        begun.append(scope["path"])
        while len(begun) < 6:
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    http = HttpServer(slow, bind("127.0.0.1", 0))
    opened = list[socket.socket]()
    try:
        with ExitStack() as stack:

            def ask(address: str) -> None:
                opened.append(stack.enter_context(connected(http, ASK, address)))

            for number in range(4):  # one client has them all
                ask("127.0.0.1")
                until(lambda asked=number + 1: len(begun) == asked)
            ask("127.0.0.2")
            until(lambda: len(begun) == 5)
            assert answer(opened[3]) == b""
            with connected(http, address="127.0.0.1") as another:
                assert answer(another) == b"", "it is the newest of this address, which still has the most"
            ask("127.0.0.3")
            for one in (*opened[:2], *opened[4:]):
                assert one.recv(4096).startswith(b"HTTP/1.1 200")
            assert answer(opened[2]) == b""
    finally:
        http.close()


@pytest.mark.parametrize(("files", "most"), [(1000, 500), (1 << 20, 4096), (-1, 4096)])
def test_connections_leave_files_to_the_engine(monkeypatch, files, most):
    monkeypatch.setattr(server_module.resource, "getrlimit", lambda _: (files, files))
    assert most_connections() == most
