"""What the server refuses, and how: OpenAI's form, the field at fault, a status that clients understand."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection

import jsonschema
import openai
import pytest

from tests.cluster.serving.conftest import KEY, RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]


def refused(server: RunningServer, path: str, body: object, **options) -> tuple[int, dict]:
    status, headers, content = server.ask(path, body, **options)
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    assert headers["x-request-id"] and content["error"]["message"]
    return status, content["error"]


@pytest.mark.parametrize(
    "field",
    [
        {"suffix": "x"},
        {"best_of": 2},
        {"functions": [{"name": "f"}]},
        {"guided_json": {}},
        {"no_such_field": 1},
        {"use_beam_search": True},
    ],
    ids=str,
)
def test_a_field_that_is_not_supported_is_named(server: RunningServer, field):
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
        status, error = refused(server, path, {**body, **field})
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert (error["param"], error["code"]) == (*field, "unsupported_field")
        assert error["message"].startswith(f"{next(iter(field))}: ")


def test_a_body_without_its_content_type_is_refused_with_the_header(server: RunningServer):
    """What `curl -d` sends by default."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    status, error = refused(server, COMPLETIONS, b'{"prompt": "a"}', **form)
    assert status == 400 and "content-type: application/json" in error["message"]


def test_fields_for_the_books_of_others_change_nothing(server: RunningServer):
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0}
    plain = server.ask(COMPLETIONS, body)[2]["choices"][0]["text"]
    fields = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "session_id": "i", "metadata": {"a": "b"}}
    status, _, reply = server.ask(COMPLETIONS, body | fields)
    assert (status, reply["choices"][0]["text"]) == (200, plain)
    for wrong in ({"metadata": {"a": 1}}, {"metadata": {str(i): "" for i in range(17)}}, {"user": 1}):
        assert refused(server, COMPLETIONS, body | wrong)[0] == 400


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [], "logprobs": None, "best_of": 1, "suffix": None, "x": None},
        {"detokenize": True, "early_stopping": False, "length_penalty": 1.0, "return_prompt_text": False},
        {"verbosity": "medium", "prompt_cache_retention": "in_memory", "function_call": "none", "store": False},
        {"stream": True, "stream_options": {"include_obfuscation": False}, "vllm_xargs": {}},
    ],
)
def test_a_field_that_asks_for_nothing_is_none(server: RunningServer, field):
    assert server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **field})[0] == 200
    chat = {name: value for name, value in field.items() if name != "logprobs"} | {"echo": False}
    assert server.ask(CHAT, {"messages": MESSAGES, "max_tokens": 1, **chat})[0] == 200
    wrong = {"length_penalty": 1.5, "early_stopping": True, "detokenize": False, "return_prompt_text": True}
    wrong |= {"verbosity": "low", "prompt_cache_retention": "24h", "store": True}
    for name, value in wrong.items():
        status, error = refused(server, COMPLETIONS, {"prompt": "a", name: value})
        assert (status, error["param"]) == (400, name)
    body = {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}}
    assert refused(server, COMPLETIONS, body)[1]["param"] == "stream_options.include_obfuscation"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"priority": 101}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2000}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "\ud800"]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"speculative": {"drafter": "no such"}}, "speculative.drafter"),
        ({"speculative": {"depth": 3}}, "speculative.depth"),
        ({"speculative": {"enabled": False, "drafter": "x"}}, "speculative"),
        ({"speculative": {"num_draft_tokens": 0}}, "speculative.num_draft_tokens"),
        ({"speculative": {"num_draft_tokens": 5}}, "speculative.num_draft_tokens"),
        ({"speculative": {"enabled": False, "num_draft_tokens": 1}}, "speculative"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "a" * 600}, "prompt"),
        ({"prompt": "a" * 600_000}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt.1"),
        ({"prompt": [1, 2, "a"]}, "prompt.2"),
        ({"prompt": [[1], [2, "a"]]}, "prompt.1.1"),
        ({"prompt": ["a"] * 9}, "n"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_out_of_range_is_named(server: RunningServer, field, param):
    status, error = refused(server, COMPLETIONS, {"prompt": "a", **field})
    assert (status, error["param"]) == (400, param), error
    assert len(error["message"]) <= 400 and server.num_running() == 0
    assert "sampling." not in error["message"], "a field of a request has no group"


@pytest.mark.parametrize(
    "value",
    [
        2**64,
        "\ud800",
        *[pytest.param(one, marks=pytest.mark.extended) for one in (-(2**64), 1e308, [2**64], {"\ud800": 1})],
    ],
    ids=ascii,
)
def test_no_value_of_a_field_is_a_failure_of_the_server(server: RunningServer, value):
    """Of any field that the document names, beside a body that is fine."""
    _, _, document = server.ask("/openapi.json")
    bodies = {
        COMPLETIONS: {"prompt": "a", "max_tokens": 1},
        CHAT: {"messages": MESSAGES, "max_tokens": 1},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }
    for path, body in bodies.items():
        form = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for field in document["components"]["schemas"][form.rpartition("/")[2]]["properties"]:
            status, _, reply = server.ask(path, {**body, field: value})
            assert status in (200, 400, 404), (path, field, reply)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"echo": True}, "echo"),
        *[({"chat_template_kwargs": {n: True}}, "chat_template_kwargs") for n in ("messages", "self", "tools")],
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_chat_is_named(server: RunningServer, fields, param):
    status, error = refused(server, CHAT, {"messages": MESSAGES, **fields})
    assert (status, error["param"]) == (400, param), error


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"a"', b"[" * 100_000, b'{"prompt": "\\ud800"}', b"\xff", b"null"]
)
def test_a_body_that_is_no_request_is_refused(server: RunningServer, body):
    assert refused(server, COMPLETIONS, body)[0] == 400


def test_an_unknown_model_route_or_method_is_not_found(server: RunningServer):
    status, error = refused(server, COMPLETIONS, {"model": "other", "prompt": "a"})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    status, error = refused(server, "/v1/models/org/other", None)
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    status, error = refused(server, "/v1/embeddings", {})
    assert status == 404 and error["message"].startswith("there is no route /v1/embeddings; /openapi.json has")
    status, error = refused(server, "/v1/completions", None)
    assert (status, error["message"]) == (405, "/v1/completions is not for GET; use POST")


def test_what_is_read_may_be_asked_for_by_its_headers_alone(server: RunningServer):
    """As health checks do it."""
    for path in ("/health", "/v1/models", "/openapi.json", "/"):
        connection = HTTPConnection(server.http.host, server.http.port, timeout=60)
        lengths = []
        for method in ("HEAD", "GET"):  # a body of the first would be read as the second reply
            connection.request(method, path, headers={"authorization": f"Bearer {KEY}"})
            reply = connection.getresponse()
            lengths.append((reply.status, reply.headers["content-length"]))
            content = reply.read()
            assert method == "GET" or not content
        assert lengths[0] == lengths[1] and lengths[0][0] == 200
        connection.close()


def test_a_path_may_end_with_a_slash(server: RunningServer):
    """A client that were sent elsewhere might leave its body behind."""
    bodies = {COMPLETIONS: {"prompt": "a", "max_tokens": 2, "seed": 1}, "/tokenize": {"prompt": "a"}}
    for path, body in {**bodies, "/v1/models": None, "/v1/models/tiny-chat": None, "/version": None}.items():
        (status, _, reply), (_, _, other) = server.ask(path + "/", body), server.ask(path, body)
        assert (status, reply.get("choices"), {*reply}) == (200, other.get("choices"), {*other}), path
    assert refused(server, COMPLETIONS + "//", {"prompt": "a"})[0] == 404


@pytest.mark.parametrize("key", [None, "", "b key", "a ke", "a keys", "\xe9"])
def test_every_route_but_health_asks_for_the_key(server: RunningServer, key):
    for path in ("/v1/models", "/v1/models/", "/metrics", "/ready", "/openapi.json", "/nothing", "//health", "//"):
        status, error = refused(server, path, None, key=key)
        assert (status, error["code"]) == (401, "invalid_api_key")
    assert refused(server, COMPLETIONS, {"prompt": "a"}, key=key)[0] == 401
    assert server.ask("/health", key=key)[0] == server.ask("/health/", key=key)[0] == 200


def test_the_official_client_raises_its_own_errors(server: RunningServer):
    with server.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with server.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny-chat", prompt="a", best_of=2)
        assert caught.value.param == "best_of" and caught.value.code == "unsupported_field"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")


def test_a_body_beyond_the_limit_is_not_read(server: RunningServer):
    """Whether it says its length or not."""
    limit = 16 * 2**20
    for header in (f"content-length: {limit + 1}", "transfer-encoding: chunked"):
        with socket.create_connection((server.http.host, server.http.port)) as connection:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n{header}\r\n"
            connection.sendall(f"{head}connection: close\r\n\r\n".encode())
            if "chunked" in header:
                connection.sendall(f"{limit + 1:x}\r\n".encode() + b" " * (limit + 1) + b"\r\n")
            answer = connection.makefile("rb").read().decode()
        assert answer.startswith("HTTP/1.1 413") and "body_too_large" in answer
    with socket.create_connection((server.http.host, server.http.port)) as connection:
        connection.sendall(
            f"POST / HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: -1\r\n\r\n".encode()
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_the_number_of_a_request_is_in_its_reply(server: RunningServer):
    body = {"prompt": "a", "max_tokens": 1}
    _, headers, reply = server.ask(COMPLETIONS, body, **{"x-request-id": "mine.1"})
    assert headers["x-request-id"] == "mine.1" and reply["id"] == "cmpl-mine.1"
    _, headers, _ = server.ask(COMPLETIONS, body, **{"x-request-id": "<script>"})
    assert len(headers["x-request-id"]) == 24


def test_the_document_of_the_api_names_the_fields(server: RunningServer):
    _, _, document = server.ask("/openapi.json")
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "speculative", "stop"} <= set(fields)
    assert json.dumps(document)


def test_the_description_names_the_refusals_that_there_are(server: RunningServer):
    """FastAPI's own would be 422."""
    _, _, document = server.ask("/openapi.json")
    answers = {path: set(next(iter(way.values()))["responses"]) for path, way in document["paths"].items()}
    assert set(map(frozenset, answers.values())) == {frozenset({"200", "4XX", "5XX"})}
    streams = {path for path, way in document["paths"].items() if "text/event-stream" in str(way)}
    assert streams == {COMPLETIONS, CHAT}
    open_ = {path for path, way in document["paths"].items() if way.get("get", {}).get("security") == []}
    assert open_ == {"/", "/health"} and document["security"] == [{"key": []}]
    described = document["paths"][COMPLETIONS]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
    for body in (b"{", {"prompt": "a", "n": 0}, {"prompt": "a", "model": "other"}):
        reply = server.ask(COMPLETIONS, body)[2]
        jsonschema.validate(reply, {**described, "components": document["components"]})
    kinds = {path: document["paths"][path]["get"]["responses"]["200"].get("content") for path in ("/ready", "/metrics")}
    assert kinds["/ready"] is None and set(kinds["/metrics"]) == {"text/plain"}
