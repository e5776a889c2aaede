"""Calls under `tool_choice=auto` over HTTP: valid, streamed or not, drafted or not, alone or beside others."""

from __future__ import annotations

import json
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from actors.grammars.masks import TextMatcher
from cluster.serving.added_tokens import AddedTokens
from cluster.serving.call_forms import HERMES, native_form
from tests.cluster.serving.conftest import TEMPLATE, RunningServer, serving
from tests.cluster.serving.test_call_forms import MARKS, tokenizer_of
from tests.cluster.serving.test_grammars import random_schema
from tests.cluster.serving.test_tools import allowed, joined, whole_of
from tests.matrices import in_turn

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "calling", "messages": [{"role": "user", "content": "q"}], "max_tokens": 250}
BODY |= {"temperature": 1.0}
SMALL = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}
UNKNOWN = {"type": "object", "not": {"required": ["n"]}}
"""What the library cannot compile."""


def tool(name: str, schema: dict[str, Any], **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


@pytest.fixture(scope="module")
def server(chat_checkpoint, half_agreeing_drafter, tmp_path_factory):
    path, drafter = [tmp_path_factory.mktemp("models") / name for name in ("calling", "drafter")]
    for copy, original in ((path, chat_checkpoint), (drafter, half_agreeing_drafter)):
        shutil.copytree(original, copy)
        tokenizer_of(chat_checkpoint, "hermes", has_tokens=True).save(str(copy / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "chat_template": "{# <tool_call> #}" + TEMPLATE})
    )
    with serving(path, drafter) as running:
        yield running


@pytest.fixture(scope="module")
def calls_soon(server: RunningServer) -> dict[str, Any]:
    """The mark of a call is likely."""
    opens = server.engine.tokenizer.token_to_id(MARKS["hermes"][0])
    return {**BODY, "logit_bias": {str(opens): 6}}


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 21))])
def test_calls_are_valid_for_random_schemas_streamed_or_not_drafted_or_not(client, calls_soon, part, monkeypatch):
    """And beside others that draft or do not. 25 pairs of schemas each, by default 2."""
    monkeypatch.setattr(TextMatcher, "_compiled", lambda matcher: matcher._compiling.result(60))
    choose, num_calls, found = random.Random(part), 0, []
    for seed in range(25 if part else 2):
        one, other = [
            {
                "type": "object",
                "properties": {"a": random_schema(choose, 2)},
                "required": ["a"],
                "additionalProperties": False,
            }
            for _ in range(2)
        ]
        body = {**calls_soon, "tools": [tool("f", one, strict=True), tool("g", other)], "seed": seed, "max_tokens": 150}
        (choice,) = client.chat.completions.create(**body).choices
        content, calls, reason = whole_of(choice)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), one if name == "f" else other)
        num_calls += len(calls)
        assert reason == "length" or (reason == "tool_calls") == bool(calls)
        assert joined(client.chat.completions.create(**body, stream=True)) == (content, calls, reason)
        found.append((body, (content, calls, reason)))
    assert num_calls >= len(found) / 2

    def again(place: int) -> None:
        body, wanted = found[place]
        extra = {"speculative": {"enabled": place % 2 == 0}}
        assert whole_of(client.chat.completions.create(**body, extra_body=extra).choices[0]) == wanted

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(again, [*range(len(found)), *range(1, len(found))]))


@pytest.mark.extended
def test_only_allowed_functions_are_called_and_one_at_most(client, calls_soon):
    """However likely the other one is."""
    tools = [tool("first", SMALL), tool("second", SMALL)]
    for name in ("first", "second"):
        body = {**calls_soon, "seed": 1, "tools": tools, "tool_choice": allowed("auto", name)}
        (choice,) = client.chat.completions.create(**body, parallel_tool_calls=False).choices
        content, calls, reason = whole_of(choice)
        assert len(calls) == 1 and calls[0][0] == name and json.loads(calls[0][1])["n"] in (1, 22)
        assert reason == "tool_calls" and "<tool_call>" not in content


def test_text_without_a_call_is_as_free_as_without_tools(client, server: RunningServer):
    """This template does not write them, and these tokens are characters."""
    letters = server.engine.tokenizer.encode("abcdefgh <>{}").ids
    body = {**BODY, "seed": 3, "max_tokens": 60, "extra_body": {"allowed_token_ids": letters}}
    (free,) = client.chat.completions.create(**body).choices
    (choice,) = client.chat.completions.create(**body, tools=[tool("f", SMALL)]).choices
    assert whole_of(choice) == whole_of(free) and choice.message.content


@pytest.mark.extended
def test_a_call_that_is_cut_is_text(client, calls_soon):
    body = {**calls_soon, "seed": 1, "tools": [tool("f", {"type": "object", "properties": {"a": {"minLength": 300}}})]}
    (choice,) = client.chat.completions.create(**body, parallel_tool_calls=False).choices
    assert choice.finish_reason == "length" and not choice.message.tool_calls and '"f"' in choice.message.content


@pytest.mark.extended
@pytest.mark.parametrize(
    ("schema", "choice"),
    list(
        in_turn(
            [{}, {"properties": {"a": {"const": 1}}}, {"type": ["object", "null"]}, None],
            ["auto", "required", {"type": "function", "function": {"name": "f"}}],
        )
    ),
)
def test_arguments_are_an_object_whatever_the_schema_leaves_open(client, calls_soon, schema, choice):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    body = {**calls_soon, "tools": tools, "tool_choice": choice, "max_tokens": 400}
    (said,) = client.chat.completions.create(**body, parallel_tool_calls=False, seed=2).choices
    for call in said.message.tool_calls or ():
        assert said.finish_reason == "length" or isinstance(json.loads(call.function.arguments), dict)
    assert said.finish_reason == "length" or said.message.tool_calls


@pytest.mark.parametrize(
    ("tools", "fields", "line"),
    [
        ([tool("f", UNKNOWN, strict=True)], {}, r"tools: .*not"),
        ([tool("f", UNKNOWN, strict=True), tool("g", UNKNOWN)], {}, r"tools: .*not"),
        ([tool("f", {"enum": ["x" * 70_000]}, strict=True)], {}, "tools: .* characters; give 1 to 65536"),
        ([tool("f", SMALL), tool("g", SMALL, strict=True)], {"ignore_eos": True}, "ignore_eos: a grammar ends"),
    ],
)
def test_what_cannot_be_held_is_a_400_that_names_it(server: RunningServer, tools, fields, line):
    status, _, reply = server.ask(CHAT, {**BODY, "tools": tools, **fields})
    assert status == 400 and re.match(line, reply["error"]["message"]), reply
    assert reply["error"]["param"] == line.partition(":")[0]


@pytest.mark.extended
def test_functions_that_are_not_strict_are_called_as_far_as_their_schemas_can_be_followed(client, calls_soon):
    """One that cannot be compiled may have any arguments, and the others are as they were; nothing is prescribed where
    all of them are too large together."""
    names, seen = {str(name) for name in range(9)}, set()
    tools = [tool("f", UNKNOWN), tool("g", SMALL, strict=True), tool("h", SMALL)]
    for seed in range(3):
        body = {**calls_soon, "seed": seed, "tools": tools, "max_tokens": 100}
        for name, arguments in whole_of(client.chat.completions.create(**body).choices[0])[1]:
            seen.add(name)
            jsonschema.validate(json.loads(arguments), {"type": "object"} if name == "f" else SMALL)
    assert {"g", "h"} & seen and seen <= {"f", "g", "h"}
    large = [tool(name, {"type": "object", "description": "x" * 10_000}) for name in sorted(names)]
    assert client.chat.completions.create(**{**calls_soon, "tools": large, "max_tokens": 5}).choices


def test_strict_is_refused_for_a_form_that_no_grammar_describes(server: RunningServer, monkeypatch):
    own = {**HERMES, "fields": {**HERMES["fields"], "thinking": {"open": "<t>", "close": "</t>"}}}
    tokens = AddedTokens(server.engine.tokenizer, [0])
    monkeypatch.setattr(server.service._model, "_call_form", native_form("", own, tokens))
    for strict, status in ((None, 200), (False, 200), (True, 400)):
        body = {**BODY, "tools": [tool("f", SMALL, strict=strict)], "max_tokens": 3}
        answer = server.ask(CHAT, body)
        assert answer[0] == status, answer
    assert answer[2]["error"]["message"].startswith("tools: nothing can be prescribed for this model's own form")
    assert server.ask(CHAT, {**body, "tool_choice": "required"})[0] == 200


@pytest.mark.parametrize(("num", "most"), [(20, 23), (40, 2)])
def test_what_is_compiled_for_one_request_is_bounded(server: RunningServer, monkeypatch, num, most):
    """All of them, each by itself unless they are many, and what is left."""
    model, compiled = server.service._model, list[str]()
    compile_grammar = model.compile_grammar
    monkeypatch.setattr(model, "compile_grammar", lambda one: compiled.append(one.text) or compile_grammar(one))
    tools = [tool(f"f{place}", {"const": {"a": place}}) for place in range(num)] + [tool("g", UNKNOWN)]
    body = {**BODY, "tools": tools, "max_tokens": 2}
    assert server.ask(CHAT, body)[0] == 200
    assert len(compiled) == most
    assert ('"const": {"a"' in compiled[-1]) == (num == 20)
