"""Load and ends: bounds on what is in flight, clients that leave, requests that take too long, shutting down."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from cluster.serving import server as server_module
from cluster.serving.server import HttpServer, bind
from tests.cluster.serving.conftest import KEY, RunningServer, serving, until

LONG = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
PACE_MS = 30.0
"""Time of a pass: a long request takes over four seconds, so that it still runs when the next thing happens."""


@pytest.fixture(scope="module")
def slow(chat_checkpoint, half_agreeing_drafter) -> Iterator[RunningServer]:
    with serving(chat_checkpoint, half_agreeing_drafter, pace_ms=PACE_MS) as running:
        yield running


def start(server: RunningServer, body: dict) -> socket.socket:
    """A request on a connection of its own, whose answer is not read."""
    content = json.dumps(body).encode()
    connection = socket.create_connection((server.http.host, server.http.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    )
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def num_aborted(server: RunningServer) -> int:
    """Requests that the coordinator aborted."""
    return server.engine.report(spans=False).counters["num_requests_aborted"]


def test_it_is_ready_once_a_token_was_generated(slow: RunningServer):
    assert slow.ask("/health")[0] == 200
    assert slow.ask("/ready")[0] == 503
    slow.service.warm_up()
    assert slow.ask("/ready")[0] == 200


def test_what_waits_leaves_by_priority(slow: RunningServer):
    """Four requests have all the places; of those that wait, the later one of lower value is served first."""
    running = [start(slow, LONG) for _ in range(4)]
    until(lambda: slow.service.num_in_flight == 4)
    ends: list[str] = []

    def ask(name: str, priority: int) -> None:
        assert slow.ask("/v1/completions", {"prompt": "a", "max_tokens": 1, "priority": priority})[0] == 200
        ends.append(name)

    waiting = []
    for number, (name, priority) in enumerate((("late", 3), ("first", -3)), start=5):
        waiting.append(threading.Thread(target=ask, args=(name, priority)))
        waiting[-1].start()
        until(lambda number=number: slow.service.num_in_flight == number)
    running[0].close()  # one place
    for thread in waiting:
        thread.join()
    for connection in running:
        connection.close()
    until(lambda: slow.service.num_in_flight == 0)
    assert ends == ["first", "late"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_disconnects_frees_its_request(slow: RunningServer, stream):
    aborted = num_aborted(slow)
    connection = start(slow, {**LONG, "stream": stream, "n": 2})
    until(lambda: slow.num_running() == 2)
    if stream:
        assert connection.recv(10)
    connection.close()
    until(lambda: slow.num_running() == 0)
    assert num_aborted(slow) == aborted + 2
    until(lambda: slow.service.num_in_flight == 0)


def test_beyond_the_bound_a_request_is_to_come_again(slow: RunningServer):
    """Four run and four wait."""
    connections = [start(slow, {**LONG, "n": 4}) for _ in range(2)]
    until(lambda: slow.num_running() == 8)
    status, headers, content = slow.ask("/v1/completions", {"prompt": "a"})
    assert (status, headers["retry-after"], content["error"]["type"]) == (429, "1", "rate_limit_error")
    with slow.client() as client, pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny-chat", prompt="a")
    for connection in connections:
        connection.close()
    until(lambda: slow.num_running() == 0)
    assert slow.ask("/v1/completions", {"prompt": "a", "max_tokens": 1, "n": 8})[0] == 200


def test_a_wait_that_would_be_too_long_is_refused(chat_checkpoint, half_agreeing_drafter):
    """Whatever the bound on the number that wait."""
    with serving(chat_checkpoint, half_agreeing_drafter, pace_ms=5.0, max_waiting=90, max_queue_s=0.01) as server:
        connection, limit = start(server, {"prompt": "a", "n": 90, "max_tokens": 20}), server.service._limit
        until(lambda: len(limit._begins) >= 16)
        status, headers, content = server.ask("/v1/completions", {"prompt": "a"})
        assert status == 429 and 1 <= int(headers["retry-after"]) <= 60 and "max_queue_s" in content["error"]["message"]
        connection.close()
        until(lambda: server.service.num_in_flight == limit._num_waiting == 0)
        assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert limit._num_waiting == 0


def test_a_request_that_is_refused_takes_no_place(slow: RunningServer):
    for _ in range(3):
        assert slow.ask("/v1/completions", {"prompt": "a", "top_p": 7})[0] == 400
        assert slow.ask("/v1/completions", {"prompt": "a", "speculative": {"drafter": "x"}})[0] == 400
    assert slow.service.num_in_flight == 0


@pytest.mark.extended
def test_many_clients_get_their_own_texts(slow: RunningServer):
    def ask(seed: int) -> str:
        body = {"prompt": f"{seed}", "seed": seed, "max_tokens": 8, "temperature": 0.9, "stream": seed % 2 == 0}
        with slow.client(max_retries=5) as client:
            reply = client.completions.create(model="tiny-chat", **body)
            return "".join(c.choices[0].text for c in reply) if body["stream"] else reply.choices[0].text

    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, range(6)))
    assert together == [ask(seed) for seed in range(6)]


@pytest.mark.extended
def test_a_request_that_takes_too_long_is_aborted(chat_checkpoint, half_agreeing_drafter):
    with serving(chat_checkpoint, half_agreeing_drafter, pace_ms=PACE_MS, timeout_s=0.4) as server:
        status, headers, content = server.ask("/v1/completions", LONG)
        assert (status, content["error"]["code"], headers["x-should-retry"]) == (504, "timeout", "false")
        _, _, text = server.ask("/v1/completions", {**LONG, "stream": True})
        assert json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        more = {"ignore_eos": True}
        with server.client() as client, pytest.raises(openai.APIError, match="timeout_s"):
            list(client.completions.create(model="tiny-chat", prompt="a", max_tokens=500, stream=True, extra_body=more))
        until(lambda: server.num_running() == 0)


def test_an_engine_that_fails_is_no_longer_healthy(chat_checkpoint, half_agreeing_drafter):
    with serving(chat_checkpoint, half_agreeing_drafter, pace_ms=PACE_MS) as server, ThreadPoolExecutor(2) as pool:
        server.service.warm_up()
        running = [pool.submit(server.ask, "/v1/completions", {**LONG, "stream": stream}) for stream in (False, True)]
        until(lambda: server.num_running() == 2)
        server.engine._fail("the target is lost")
        status, _, content = running[0].result(30)
        assert (status, content["error"]["message"]) == (500, "the target is lost")
        assert "the target is lost" in running[1].result(30)[2].split("\n\n")[-2]
        for path in ("/health", "/ready"):
            assert server.ask(path)[0] == 503


def test_what_the_end_cuts_off_leaves_no_trace(monkeypatch, caplog):
    """As after a second Ctrl-C, or once `server.drain_s` are over."""
    monkeypatch.setattr(server_module, "_END_S", 0.1)
    began = threading.Event()

    async def endless(_scope: object, _receive: object, send: Callable) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        began.set()
        await asyncio.Event().wait()

    http = HttpServer(endless, bind("127.0.0.1", 0))
    with socket.create_connection((http.host, http.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert began.wait(30)
        http.close()
        assert "Cancel 1 running task" in caplog.text and not [one for one in caplog.records if one.exc_info]
        while connection.recv(4096):  # its end
            pass


@pytest.mark.extended
def test_shutting_down_lets_running_requests_end(slow: RunningServer):
    """Last of this file: the server takes no further requests."""
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(slow.ask, "/v1/completions", {**LONG, "max_tokens": 120})
        until(lambda: slow.num_running() == 1)
        draining = pool.submit(slow.service.drain, 30.0)
        until(lambda: slow.ask("/ready")[0] == 503)
        status, headers, content = slow.ask("/v1/completions", {"prompt": "a"})
        assert (status, headers["retry-after"], content["error"]["code"]) == (503, "1", "shutting_down")
        assert not draining.done() and slow.ask("/health")[0] == 200
        assert running.result(30)[2]["usage"]["completion_tokens"] == 120
        assert draining.result(30)
    slow.http.close()
    with pytest.raises(OSError):
        slow.ask("/health")
    assert "http-server" not in {thread.name for thread in threading.enumerate()}


def test_what_does_not_end_in_time_ends_with_an_error(chat_checkpoint, half_agreeing_drafter, caplog):
    """And not with a connection that is cut."""
    caplog.set_level(logging.WARNING)
    with serving(chat_checkpoint, half_agreeing_drafter, pace_ms=PACE_MS) as server, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.ask, "/v1/completions", {**LONG, "stream": stream}) for stream in (False, True)]
        until(lambda: server.num_running() == 2)
        assert not server.service.drain(0.2)
        assert server.service.num_in_flight == 0
        status, _, content = running[0].result(30)
        assert status == 500 and "server.drain_s" in content["error"]["message"]
        assert "server.drain_s" in running[1].result(30)[2].split("\n\n")[-2]
        assert not caplog.records


def test_small_parts_of_replies_are_sent_without_delay(server: RunningServer):
    """On a connection that is kept, the system would hold a second part until the client acknowledges the first, 40 ms
    later."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http.port)
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b""
    sockets = [one.transport.get_extra_info("socket") for one in server.http._uvicorn.server_state.connections]
    assert {one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets} == {1}
    connection.close()
