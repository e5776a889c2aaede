"""What `/openapi.json` says of replies: all that the server answers is as it says, and nothing that it says never
comes."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.lookup.copy import CopyDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from tests.cluster.serving.conftest import RunningServer, serving
from tests.cluster.serving.test_reasoning import CLOSED, THINKING, thinking_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON, EVENTS = "application/json", "text/event-stream"
REPETITIVE = {"max_tokens": 12, "temperature": 0, "logit_bias": {"65": 20}}  # what lookups draft
PREDICTED = {"max_tokens": 12, "prediction": {"content": "AAAAAA"}, "speculative": {"drafter": "copy"}}
LISTED = {"return_token_ids": True, "prompt_logprobs": 1, "n": 2, "max_tokens": 3}
SCHEMA = {"type": "object", "properties": {"value": {"enum": [1, 2]}}, "required": ["value"]}
TOOL = {"type": "function", "function": {"name": "now", "parameters": SCHEMA}}
MESSAGES = {"messages": [{"role": "user", "content": "rain?"}], "max_tokens": 40, "seed": 3}
THINKS = {**MESSAGES, "chat_template_kwargs": {"thinks": True}, "logit_bias": {CLOSED: 3.0}, "max_tokens": 200}
ANSWERS = {**MESSAGES, "chat_template_kwargs": {"thinks": False}, "max_tokens": 100}
BODIES: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [
        {"prompt": "ab", **REPETITIVE},
        {"prompt": ["ab", "cd"], **LISTED, "logprobs": 2, "echo": True, "stop_token_ids": [70]},
        {"prompt": "AAAA", **PREDICTED},
        {"prompt": "ab", "max_tokens": 60, "structured_outputs": {"json": SCHEMA}},
        {"prompt": "ab", "allowed_token_ids": [0], "min_tokens": 1, "stream": True},  # an error in the end
    ],
    CHAT: [
        THINKS,
        {**MESSAGES, **LISTED, "logprobs": True, "top_logprobs": 2},
        {**MESSAGES, **PREDICTED},
        {**ANSWERS, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {**ANSWERS, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "now"}}},
    ],
    "/tokenize": [{"prompt": "ab", "return_token_strs": True}, {"messages": MESSAGES["messages"]}],
    "/detokenize": [{"tokens": [70, 71]}],
}
READ = ("/v1/models", "/v1/models/{name}", "/version", "/timeline")
DETAILS = ("prompt_tokens_details", "completion_tokens_details")
EMPTY, TEXTS = ("/health", "/ready"), {"/": "text/html", "/metrics": "text/plain"}


@pytest.fixture(scope="module")
def server(chat_checkpoint, tmp_path_factory) -> Iterator[RunningServer]:
    """Of a checkpoint that reasons, with two drafters."""
    path = tmp_path_factory.mktemp("models") / "thinking"
    shutil.copytree(chat_checkpoint, path)
    thinking_tokenizer(chat_checkpoint).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>", "chat_template": THINKING}))
    drafter = AutoDrafterConfig(drafters=[CopyDrafterConfig(), NgramDrafterConfig(min_ngram=1)], num_draft_tokens=4)
    with serving(path, drafter) as running:
        running.service.warm_up()
        yield running


@pytest.fixture(scope="module")
def document(server: RunningServer) -> dict[str, Any]:
    return server.ask("/openapi.json")[2]


@pytest.fixture(scope="module")
def records(server: RunningServer, document) -> list[tuple[Any, dict[str, Any]]]:
    """What the server answers to all of these, whole and in events, each with the schema that the document has."""
    found = []
    for path in READ:
        described = document["paths"][path]["get"]["responses"]["200"]["content"]
        status, _, reply = server.ask(path.format(name="thinking"))
        assert (status, [*described]) == (200, [JSON])
        found.append((reply, described[JSON]["schema"]))
    for path, bodies in BODIES.items():
        described = document["paths"][path]["post"]["responses"]["200"]["content"]
        for body in bodies:
            if not body.get("stream"):
                status, _, reply = server.ask(path, body)
                assert status == 200, reply
                found.append((reply, described[JSON]["schema"]))
            if EVENTS in described and "prompt_logprobs" not in body:
                found += events(server, path, body, described[EVENTS]["schema"])
    for path, body in ((COMPLETIONS, {"prompt": "ab"}), (CHAT, MESSAGES)):
        described = document["paths"][path]["post"]["responses"]["200"]["content"]
        more = {"return_token_ids": True, "max_tokens": 3, "logprobs": path == CHAT or 1}
        found += events(server, path, {**body, **more}, described[EVENTS]["schema"])
    return found


def events(server: RunningServer, path: str, body: dict[str, Any], schema: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The records of a stream, each with the schema that its events have for them."""
    options = {"include_usage": True, "include_proposers": True}
    status, headers, text = server.ask(path, {**body, "stream": True, "stream_options": options})
    assert (status, headers.get_content_type()) == (200, EVENTS)
    found = [{"data": event.removeprefix("data: ")} for event in text.split("\n\n")[:-1]]
    for event in found:
        jsonschema.validate(event, schema)
    end, record = schema["properties"]["data"]["anyOf"]
    assert end["const"] == found[-1]["data"] or "error" in json.loads(found[-1]["data"])
    assert record["contentMediaType"] == JSON
    return [(json.loads(event["data"]), record["contentSchema"]) for event in found if event["data"] != end["const"]]


@pytest.fixture(scope="module")
def check(document) -> Callable[[dict[str, Any]], jsonschema.Draft202012Validator]:
    """Makes the validator of what a schema names, which accepts no field that the document does not have."""
    components = copy.deepcopy(document["components"])
    for one in components["schemas"].values():
        if "properties" in one:
            one["additionalProperties"] = False
    return lambda schema: jsonschema.Draft202012Validator({**schema, "components": components})


def test_all_routes_are_asked(document):
    assert {*document["paths"]} == {*READ, *BODIES, *EMPTY, *TEXTS}


@pytest.mark.extended
def test_every_answer_is_as_the_document_says(check, records):
    assert len(records) > 60
    for record, schema in records:
        check(schema).validate(record)


@pytest.mark.extended
def test_no_field_is_described_that_never_comes(document, check, records):
    """In no answer to any of the requests above."""
    schemas = document["components"]["schemas"]
    seen: set[tuple[str, str]] = set()

    def visit(value: Any, schema: dict[str, Any]) -> None:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if isinstance(value, dict):
                seen.update((name, field) for field in value)
            visit(value, schemas[name])
        for one in schema.get("anyOf", ()):
            if check(one).is_valid(value):
                visit(value, one)
        if isinstance(value, dict):
            for field, inner in value.items():
                visit(inner, schema.get("properties", {}).get(field) or schema.get("additionalProperties") or {})
        for inner in value if isinstance(value, list) and isinstance(schema.get("items"), dict) else ():
            visit(inner, schema["items"])

    for record, schema in records:
        visit(record, schema)
    names = {name for name, _ in seen} - {"ApiError"}
    assert {"CompletionReply", "ChatReply", "ChatChunk", "CallDelta", "RequestMetrics", "PromptToken"} <= names
    described = {(name, field) for name in names for field in schemas[name]["properties"]}
    assert described - seen == set()


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["missing", "unknown", "of another type"])
def test_an_answer_that_is_otherwise_would_be_noticed(check, records, kind):
    """In each field of a reply, of its first choice and of its usage."""
    reply, schema = next((one, how) for one, how in records if one.get("object") == "chat.completion")
    validator, num = check(schema), 0
    for place in ((), ("choices", 0), ("choices", 0, "message"), ("usage",)):
        for field in [*_at(reply, place)]:
            wrong = copy.deepcopy(reply)
            record = _at(wrong, place)
            if kind == "missing":
                del record[field]
                if validator.is_valid(wrong):  # those that may be absent
                    assert field in ("metrics", "usage", "seed", "stop_reason", "reasoning", *DETAILS)
                    continue
            elif kind == "unknown":
                record[field + "_"] = 1
            else:
                record[field] = [[]]
            assert not validator.is_valid(wrong), (place, field)
            num += 1
    assert num > 10


def _at(value: Any, place: tuple[str | int, ...]) -> Any:
    for step in place:
        value = value[step]
    return value


def test_what_has_no_record_has_none_in_the_document(server: RunningServer, document):
    for path in EMPTY:
        assert server.ask(path)[::2] == (200, "")
        assert "content" not in document["paths"][path]["get"]["responses"]["200"]
    for path, kind in TEXTS.items():
        assert server.ask(path)[1].get_content_type() == kind
        assert [*document["paths"][path]["get"]["responses"]["200"]["content"]] == [kind]


def test_what_the_server_reads_and_what_it_sends_have_names_of_their_own(document):
    """Of two records with one name one would be lost."""
    refs = {ref for ref in json.dumps(document).split('"') if ref.startswith("#/components/schemas/")}
    assert {ref.rpartition("/")[2] for ref in refs} == {*document["components"]["schemas"]}
