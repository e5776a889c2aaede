"""Texts whose form is prescribed, over HTTP with the official client: always valid, streamed or not, drafted or not."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import Future
from typing import Any

import jsonschema
import pytest

from actors.grammars.masks import TextMatcher
from actors.protocol.grammar import Grammar
from actors.protocol.messages import SamplingParams
from cluster.serving import grammar_check
from cluster.serving.served_model import ServedModel
from tests.cluster.serving.conftest import RunningServer

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bb", None]},
        "size": {"type": "integer", "minimum": 0, "maximum": 300},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "size", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
BODY: dict[str, Any] = {"model": "tiny-chat", "max_tokens": 250, "seed": 3}
MESSAGES: list[Any] = [{"role": "user", "content": "a thing"}]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_a_chat_follows_its_schema_streamed_or_not(client, temperature):
    body = {**BODY, "messages": MESSAGES, "temperature": temperature, "response_format": FORMAT}
    (choice,) = client.chat.completions.create(**body).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].finish_reason == "stop"
    plain = client.chat.completions.create(**body, extra_body={"speculative": {"enabled": False}})
    assert plain.choices[0].message.content == choice.message.content


@pytest.mark.extended
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "(yes|no){1,3}!"}, r"(yes|no){1,3}!"),
        ({"choice": ["ja", 'n"ein\n', "vielleicht é"]}, 'ja|n"ein\n|vielleicht é'),
        ({"grammar": 'start: A ("," A)* "."\nA: /[a-c]{1,4}/'}, r"[a-c]{1,4}(,[a-c]{1,4})*\."),
        ({"json": json.dumps({"type": "boolean"})}, "true|false"),
        ({"json": {"const": 17}}, "17"),
    ],
)
def test_a_completion_follows_what_vllm_calls_structured_outputs(client, form, pattern):
    body = {**BODY, "prompt": ["abc", "d"], "n": 3, "temperature": 1.0, "extra_body": {"structured_outputs": form}}
    choices = client.completions.create(**body).choices
    assert len(choices) == 6 and {choice.finish_reason for choice in choices} == {"stop"}
    assert all(re.fullmatch(pattern, choice.text) for choice in choices), [choice.text for choice in choices]


@pytest.mark.extended
def test_json_object_is_any_object(client):
    body = {**BODY, "messages": MESSAGES, "temperature": 1.0, "n": 4, "max_tokens": 40}
    for form in (
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"structured_outputs": {"json_object": True}}},
    ):
        for choice in client.chat.completions.create(**body, **form).choices:
            assert choice.message.content.startswith("{")
            if choice.finish_reason == "stop":
                assert isinstance(json.loads(choice.message.content), dict)
    free = client.chat.completions.create(**body, response_format={"type": "text"})
    assert not free.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"response_format": {"type": "xml"}}, r"response_format\.type: input should be"),
        ({"response_format": {"type": "json_schema"}}, r"response_format: .*needs it"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}},
            r"response_format: this json_schema cannot be used \(Invalid type: foo\)",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            r"response_format: .*not",
        ),
        ({"structured_outputs": {"regex": "(("}}, r"structured_outputs: this regex cannot be used"),
        ({"structured_outputs": {"regex": "a" * 70000}}, r"structured_outputs: .*70000 characters"),
        ({"structured_outputs": {"grammar": "x"}}, r"structured_outputs: this lark cannot be used"),
        ({"structured_outputs": {"json": "[1"}}, r"structured_outputs: is no json_schema"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs: is no regex"),
        ({"structured_outputs": {}}, "structured_outputs: give one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs: give one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs: choice: give at least one"),
        ({"structured_outputs": {"guided": "x"}}, r"structured_outputs\.guided: is not supported"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs: response_format says"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos: a grammar ends"),
    ],
)
def test_what_is_no_form_is_a_400_that_names_the_field(server: RunningServer, fields, line):
    status, _, body = server.ask("/v1/completions", {"prompt": "a", **fields})
    assert status == 400 and re.match(line, body["error"]["message"]), body
    assert body["error"]["param"].partition(".")[0] == line.partition(":")[0].partition("\\.")[0]


NESTED: Any = 1
for _ in range(400):
    NESTED = {"items": NESTED}


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": NESTED}},
        {"structured_outputs": {"json": json.dumps(NESTED)}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NESTED}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": NESTED}}], "tool_choice": "required"},
        {"structured_outputs": {"regex": r"[^\s\S]"}},
        {"structured_outputs": {"json": {"$ref": "#"}}},
        {"structured_outputs": {"choice": ["a"]}, "min_tokens": 3},
        {"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_what_no_text_can_follow_is_the_client_s_mistake(server: RunningServer, fields):
    """Streamed too: the reply has begun then, and its last event says it."""
    body = {"messages": MESSAGES, "max_tokens": 8, **fields}
    status, _, reply = server.ask("/v1/chat/completions", body)
    assert status == 400 and reply["error"]["type"] == "invalid_request_error", reply
    status, _, streamed = server.ask("/v1/chat/completions", {**body, "stream": True})
    last = streamed if status == 400 else json.loads(streamed.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last == reply and server.num_running() == 0


def test_a_choice_of_thousands_is_followed(client):
    choice = [f"entry {i}" for i in range(3000)]
    body = {
        **BODY,
        "prompt": "abc",
        "n": 2,
        "temperature": 1.0,
        "extra_body": {"structured_outputs": {"choice": choice}},
    }
    assert {one.text for one in client.completions.create(**body).choices} <= set(choice)


def test_grammars_that_wait_for_others_may_come_again(server: RunningServer, monkeypatch):
    """What takes long is a 400 of its own; what has not begun is no fault of the request."""
    begun, waiting = Future[Any](), Future[Any]()
    begun.set_running_or_notify_cancel()
    compiling = [begun, waiting]
    monkeypatch.setattr(grammar_check, "_COMPILE_S", 0.1)
    monkeypatch.setattr(ServedModel, "compile_grammar", lambda *_: compiling.pop(0))
    found = []
    for _ in range(2):
        body = {"prompt": "a", "structured_outputs": {"choice": ["new"]}}
        status, headers, reply = server.ask("/v1/completions", body)
        found.append((status, headers["retry-after"], reply["error"]["code"]))
    assert found == [(400, None, None), (429, "1", "rate_limit_exceeded")]
    assert waiting.cancelled() and not compiling


def random_schema(choose: random.Random, depth: int) -> dict[str, Any]:
    """A schema of every kind that is supported, whose texts are short."""

    def inner() -> dict[str, Any]:
        return random_schema(choose, depth - 1)

    low = choose.randrange(3)
    leaves = [
        {"type": "integer", "minimum": low - 9, "maximum": low + choose.randrange(200)},
        {"type": "number", "minimum": 0, "exclusiveMaximum": choose.randrange(1, 9)},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "minLength": low, "maxLength": low + choose.randrange(4)},
        {"type": "string", "pattern": choose.choice(["^[a-f]{2,4}$", "^(ab|c){1,3}d?$"])},
        {"type": "string", "format": choose.choice(["date", "time", "ipv4"])},
        {"enum": choose.sample([1, "one", None, True, 2.5, "zwölf", [], {}], choose.randint(1, 4))},
        {"const": choose.choice([0, "x", {"a": [1]}, False])},
    ]
    kind = choose.choice(["object", "array", "anyOf", "tuple", *(["leaf"] * 2)]) if depth else "leaf"
    if kind == "object":
        names = choose.sample(["a", "bb", "c d", "é", 'q"'], choose.randint(0, 3))
        required = [name for name in names if choose.random() < 0.6]
        extra = choose.choice([False, {"const": 1}])
        fields = {name: inner() for name in names}
        return {"type": "object", "properties": fields, "required": required, "additionalProperties": extra}
    if kind == "array":
        return {"type": "array", "items": inner(), "minItems": low, "maxItems": low + 1}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 2}
    return {"anyOf": [inner() for _ in range(low + 1)]} if kind == "anyOf" else choose.choice(leaves)


@pytest.mark.extended
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 41))])
def test_every_reply_that_ended_is_valid_for_its_random_schema(server: RunningServer, part, monkeypatch):
    """25 schemas each, by default 5, 1,000 in all; drafted and not, and every request of a batch under another one.

    Passes wait for each of them: how long they wait for those of one client is bounded, which other tests show.
    """
    monkeypatch.setattr(TextMatcher, "_compiled", lambda matcher: matcher._compiling.result(60))
    num_schemas = 25 if part else 5
    choose, running, num_ended = random.Random(part), [], 0
    for i in range(num_schemas):
        schema = random_schema(choose, 3)
        sampling = SamplingParams(max_tokens=120, temperature=choose.choice([0.0, 1.0]), seed=i)
        options: dict[str, Any] = {"grammar": Grammar("json_schema", json.dumps(schema))}
        pair = [server.engine.submit("abc", sampling, drafter=drafter, **options) for drafter in (None, "none")]
        running.append((schema, pair))
    for schema, (drafted, plain) in running:
        assert drafted.result(60).token_ids == plain.result(60).token_ids, schema
        assert drafted.finish_reason in ("stop", "length")
        if drafted.finish_reason == "stop":
            num_ended += 1
            jsonschema.validate(json.loads(drafted.text), schema)
    assert num_ended > num_schemas / 2, f"only {num_ended} of {num_schemas} ended"
