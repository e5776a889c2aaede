"""Pages in browsers: the origins that may use the server, what a browser asks before, and what a page may read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.config.schema import ServerConfig
from cluster.serving.app import HttpService
from cluster.serving.server import HttpServer, bind
from tests.cluster.serving.conftest import KEY, RunningServer

PAGE, OTHER = "https://chat.example", "https://other.example"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type,x-own"}
COMPLETIONS, BODY = "/v1/completions", {"prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module", params=[[PAGE, "http://localhost:3000"], ["*"]], ids=["named", "any"])
def opened(request, server: RunningServer) -> Iterator[RunningServer]:
    """The same engine, with this option."""
    config = replace(server.engine.config, server=ServerConfig(port=0, cors_origins=request.param))
    service = HttpService(server.engine, config, [KEY])
    http = HttpServer(service.application, bind("127.0.0.1", 0))
    yield RunningServer(server.engine, service, http)
    http.close()
    service.close()


def preflight(server: RunningServer, origin: str) -> tuple[int, dict[str, str]]:
    """What a browser is answered, which sends no key with its question."""
    status, headers, _ = server.ask(COMPLETIONS, None, key=None, method="OPTIONS", origin=origin, **ASKS)
    return status, {name.lower(): value for name, value in headers.items()}


def test_a_browser_may_ask_without_a_key(opened: RunningServer):
    status, headers = preflight(opened, PAGE)
    assert status == 200 and headers["access-control-allow-origin"] in (PAGE, "*")
    allowed = {name.strip() for name in headers["access-control-allow-headers"].lower().split(",")}
    assert {"authorization", "content-type", "x-own"} <= allowed
    assert {name.strip() for name in headers["access-control-allow-methods"].split(",")} == {"GET", "HEAD", "POST"}
    assert "access-control-allow-credentials" not in headers


def test_the_page_may_read_answers_streams_and_refusals(opened: RunningServer):
    """With their number and the time after which to come again."""
    for body, key, status in (
        (BODY, KEY, 200),
        ({**BODY, "stream": True}, KEY, 200),
        (BODY, None, 401),
        ({}, KEY, 400),
    ):
        found, headers, _ = opened.ask(COMPLETIONS, body, key=key, origin=PAGE)
        assert found == status and headers["access-control-allow-origin"] in (PAGE, "*")
        exposed = {name.strip() for name in headers["access-control-expose-headers"].split(",")}
        assert exposed == {"x-request-id", "retry-after", "x-should-retry"}


def test_pages_of_other_origins_may_not(opened: RunningServer, request):
    status, headers = preflight(opened, OTHER)
    if request.node.callspec.id == "any":
        assert (status, headers["access-control-allow-origin"]) == (200, "*")
        return
    assert status == 400 and "access-control-allow-origin" not in headers
    _, headers, _ = opened.ask(COMPLETIONS, BODY, origin=OTHER)
    assert "access-control-allow-origin" not in headers


def test_by_default_no_page_may(server: RunningServer):
    status, headers = preflight(server, PAGE)
    assert status == 401 and "access-control-allow-origin" not in headers
    _, headers, _ = server.ask(COMPLETIONS, BODY, origin=PAGE)
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://Chat.example", "", "https://", "null"]
)
def test_what_is_no_origin_is_refused_at_the_start(origin):
    ServerConfig(cors_origins=[PAGE, "http://[::1]:8000", "*"]).check("server")
    with pytest.raises(ValueError, match=r"^server\.cors_origins=.*: is no origin; give SCHEME://HOST"):
        ServerConfig(cors_origins=[PAGE, origin]).check("server")
