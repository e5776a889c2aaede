"""Spans of requests, as a collector of OpenTelemetry on the loopback receives them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cluster.config.schema import ServerConfig
from tests.cluster.serving.conftest import NUM_DRAFT_TOKENS, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its URL, and the spans that it was sent."""
    received: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                received.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/v1/traces", received
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def attributes(span: Any) -> dict[str, Any]:
    values = {one.key: one.value for one in span.attributes}
    lists = {name: [one.string_value for one in value.array_value.values] for name, value in values.items()}
    return {name: lists[name] or value.int_value or value.string_value for name, value in values.items()}


def test_each_answered_request_is_a_span(chat_checkpoint, half_agreeing_drafter, collector, monkeypatch):
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    url, received = collector
    body = {"prompt": "abc", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    with serving(chat_checkpoint, half_agreeing_drafter, traces_endpoint=url) as server:
        parent = f"00-{TRACE}-{PARENT}-01"
        server.ask("/v1/completions", {**body, "n": 2}, traceparent=parent, **{"x-request-id": "mine"})
        server.ask("/v1/completions", {**body, "stream": True}, traceparent="of no form")
        server.ask("/v1/completions", body, traceparent=f"00-{TRACE}-{PARENT}-00")  # its sender samples nothing
        server.ask("/v1/completions", {**body, "unknown": 1})
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "ignore_eos": True}
        server.ask("/v1/chat/completions", chat)
    first, streamed, talked = sorted(received, key=lambda span: span.start_time_unix_nano)
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert streamed.trace_id.hex() != TRACE and not streamed.parent_span_id
    assert [one.name for one in (first, streamed, talked)] == [
        "text_completion tiny-chat",
        "text_completion tiny-chat",
        "chat tiny-chat",
    ]
    said, alone = attributes(first), attributes(streamed)
    assert said["specdec.request_id"] == "mine" and said["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (3, 18)
    assert alone["gen_ai.usage.output_tokens"] == 9
    steps, drafted, accepted = (
        alone[f"specdec.num_{name}"] for name in ("spec_steps", "draft_tokens", "accepted_tokens")
    )
    assert 0 < accepted <= drafted <= NUM_DRAFT_TOKENS * steps
    for span in (first, streamed, talked):
        (token,) = span.events
        assert token.name == "first token"
        assert span.start_time_unix_nano < token.time_unix_nano < span.end_time_unix_nano


def test_an_endpoint_that_is_no_url_is_refused():
    with pytest.raises(ValueError, match=r"^server.traces_endpoint=localhost:4318: is no URL; give http://HOST"):
        ServerConfig(traces_endpoint="localhost:4318").check_fields("server")
