"""Tools: forced calls over HTTP with the official client, calls in the forms that models write, at every cut."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from cluster.serving.added_tokens import AddedTokens
from cluster.serving.call_forms import HERMES, native_form
from cluster.serving.call_readers import (
    ArgumentsReader,
    CallListReader,
    CallPart,
    JsonReplyReader,
    MarkedCallReader,
    TemplateReader,
)
from cluster.serving.xml_calls import XmlCallReader
from tests.cluster.serving.conftest import RunningServer, serving
from tests.matrices import in_turn

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 4}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "of days", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
BODY: dict[str, Any] = {
    "model": "tiny-chat",
    "messages": [{"role": "user", "content": "rain?"}],
    "tools": TOOLS,
    "max_tokens": 300,
    "temperature": 1.0,
    "seed": 3,
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SCHEMAS = {"weather": WEATHER, "now": {"type": "object"}}


class Point(BaseModel):
    x: int = Field(ge=0, le=9)


def joined(chunks):
    """Content, calls by index and finish reason of a stream with one choice."""
    content, calls, reason = "", {}, None
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            name, arguments = calls.get(call.index, (None, ""))
            calls[call.index] = (call.function.name or name, arguments + (call.function.arguments or ""))
        reason = choice.finish_reason or reason
    return content, [calls[index] for index in sorted(calls)], reason


def whole_of(choice):
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


def test_a_function_without_parameters_is_called_without_any(client):
    tools = [{"type": "function", "function": {"name": "now"}}]
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        body = {**BODY, "tools": tools, "tool_choice": choice}
        (said,) = client.chat.completions.create(**body, parallel_tool_calls=False).choices
        (call,) = said.message.tool_calls
        assert json.loads(call.function.arguments) == {}


@pytest.mark.parametrize("seed", list(in_turn(range(3), times={0: 0, 1: 0})))
def test_a_required_call_is_one_of_the_tools_with_valid_arguments(client, seed):
    body = {**BODY, "seed": seed, "tool_choice": "required"}
    (choice,) = client.chat.completions.create(**body, parallel_tool_calls=False).choices
    content, calls, reason = whole_of(choice)
    assert (content, reason, choice.message.content, len(calls)) == ("", "tool_calls", None, 1)
    for call in choice.message.tool_calls:
        assert call.type == "function" and re.fullmatch("call_[0-9a-f]{24}", call.id)
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    chunks = client.chat.completions.create(**body, parallel_tool_calls=False, stream=True)
    assert joined(chunks) == (content, calls, reason)
    plain = client.chat.completions.create(
        **body, parallel_tool_calls=False, extra_body={"speculative": {"enabled": False}}
    )
    assert whole_of(plain.choices[0]) == (content, calls, reason)


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("name", ["weather", pytest.param("now", marks=pytest.mark.extended)])
def test_only_allowed_tools_are_called(client, server: RunningServer, name):
    """However likely the other one is, with drafts or not, streamed or not."""
    (other,) = {"weather", "now"} - {name}
    likely = {str(server.engine.tokenizer.encode(other[0]).ids[0]): 50}
    body = {**BODY, "logit_bias": likely, "parallel_tool_calls": False}
    (free,) = client.chat.completions.create(**body, tool_choice="required").choices
    assert [one for one, _ in whole_of(free)[1]] == [other]
    body["tool_choice"] = allowed("required", name)
    (choice,) = client.chat.completions.create(**body).choices
    ((called, arguments),) = whole_of(choice)[1]
    assert called == name
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert joined(client.chat.completions.create(**body, stream=True)) == whole_of(choice)
    plain = client.chat.completions.create(**body, extra_body={"speculative": {"enabled": False}})
    assert whole_of(plain.choices[0]) == whole_of(choice)


@pytest.mark.extended
def test_a_named_function_is_called_with_the_text_as_its_arguments(client):
    (choice,) = client.chat.completions.create(**BODY, tool_choice=NAMED).choices
    _, ((name, arguments),), reason = whole_of(choice)
    assert (name, reason) == ("weather", "stop")
    jsonschema.validate(json.loads(arguments), WEATHER)
    assert joined(client.chat.completions.create(**BODY, tool_choice=NAMED, stream=True)) == whole_of(choice)


def test_without_a_choice_of_tools_the_reply_is_text(client):
    body = {**BODY, "max_tokens": 40}
    reply = client.chat.completions.create(**body, tool_choice="none")
    free = client.chat.completions.create(**{name: value for name, value in body.items() if name != "tools"})
    assert reply.choices[0].message.content == free.choices[0].message.content
    assert reply.choices[0].message.tool_calls is None


CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"tools": TOOLS}, "tools: tiny-chat has no form of calls that this server knows; use tool_choice=required"),
        ({"tool_choice": "required"}, "tool_choice: required needs tools"),
        ({"tool_choice": NAMED}, "tool_choice: there is no tool 'weather'"),
        ({"tools": [TOOLS[0], TOOLS[0]], "tool_choice": "required"}, "tools: have two functions of one name"),
        ({"tools": TOOLS, "tool_choice": allowed("required", "now", "sun")}, "tool_choice: there is no tool 'sun'"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "sun")}, "tool_choice: there is no tool 'sun'"),
        ({"tool_choice": allowed("auto", "now")}, "tool_choice: there is no tool 'now'"),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto")},
            "tool_choice.allowed_tools.tools: list should have",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto", *["now"] * 1025)},
            "tool_choice.allowed_tools.tools: has 1025 entries; give at most 1024",
        ),
        ({"tools": TOOLS, "tool_choice": allowed("none", "now")}, "tool_choice.allowed_tools.mode: input should be"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools: field required"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type: input should be 'function'"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "now")}, "tools: tiny-chat has no form of calls"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\.0\.function\.name: "),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tools: cannot be used with response_format",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "foo"}}}],
                "tool_choice": "required",
            },
            r"tools: this json_schema cannot be used \(Invalid type: foo\)",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0: tool_call_id: is for the role tool"),
        ({"messages": [{"role": "user"}]}, "messages.0: content: is missing"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0: tool_calls: are made by"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "a", "arguments": "{"}}]},
                ]
            },
            "messages: the arguments of the call 1 are not JSON",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_a_400(server: RunningServer, fields, line):
    messages = [{"role": "user", "content": "x"}]
    status, _, body = server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 5, **fields})
    assert status == 400 and re.match(line, body["error"]["message"]), body


HERMES_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}={{ c.function.arguments.days }}</tool_call>"
    "{% endfor %}{{ m.tool_call_id }}\n{% endfor %}"
)


@pytest.mark.extended
def test_the_template_reads_tools_calls_and_their_results(chat_checkpoint, half_agreeing_drafter, tmp_path):
    """And a model with a form of its own may answer as it likes."""
    path = tmp_path / "hermes"
    path.mkdir()
    for file in Path(chat_checkpoint).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": HERMES_TEMPLATE}))
    call = {"id": "7", "type": "function", "function": {"name": "weather", "arguments": '{"days": 2}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "7", "content": [{"type": "text", "text": "wet"}]},
    ]
    with serving(path, half_agreeing_drafter) as running, running.client() as client:
        _, _, body = running.ask("/tokenize", {"messages": messages, "tools": TOOLS[1:]})
        text = running.engine.tokenizer.decode(body["tokens"])
        said = '{"type": "function", "function": {"name": "now"}}\n[user]hi\n'
        assert text == f"{said}[assistant]<tool_call>weather=2</tool_call>\n[tool]wet7\n"
        some = {"messages": messages, "tools": TOOLS, "max_tokens": 1}
        counts = [
            client.chat.completions.create(**some, model="hermes", tool_choice=choice).usage.prompt_tokens
            for choice in ("auto", allowed("auto", "now"), allowed("required", "now"))
        ]
        assert len({*counts}) == 1, "what is allowed does not change the prompt"
        own = {**BODY, "model": "hermes", "max_tokens": 40}
        (choice,) = client.chat.completions.create(**own).choices
        assert whole_of(choice)[1] == [] and choice.message.content
        assert joined(client.chat.completions.create(**own, stream=True)) == whole_of(choice)


@pytest.mark.extended
def test_a_message_of_the_official_client_goes_back_as_it_is(client):
    """Its readers of streams and of schemas add fields of their own, and `index` and nulls are left in the calls."""
    tools = [openai.pydantic_function_tool(Point, name="put")]
    body = {**BODY, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**body) as stream:
        called = stream.get_final_completion().choices[0].message
    assert called.tool_calls[0].function.parsed_arguments is not None
    form = {name: value for name, value in BODY.items() if name != "tools"}
    parsed = client.chat.completions.parse(**form, response_format=Point).choices[0].message
    assert parsed.parsed is not None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in called.tool_calls]
    for answer in (called, called.model_dump()):
        messages = [*BODY["messages"], answer, *results, parsed]
        assert client.chat.completions.create(**{**form, "messages": messages, "max_tokens": 2}).choices


@pytest.mark.parametrize("arguments", ["", "{}", '{"a": 1}'])
def test_a_call_without_arguments_has_none(server: RunningServer, arguments):
    assert server.ask("/v1/chat/completions", {"messages": earlier_call(arguments), "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, "1" * 5_000])
def test_arguments_that_are_none_are_refused(server: RunningServer, arguments):
    status, _, reply = server.ask("/v1/chat/completions", {"messages": earlier_call(arguments), "max_tokens": 1})
    assert (status, reply["error"]["param"]) == (400, "messages"), reply


def earlier_call(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "7", "type": "function", "function": {"name": "now", "arguments": arguments}}
    said = {"role": "assistant", "content": "a", "tool_calls": [call]}
    return [*BODY["messages"], said, {"role": "tool", "tool_call_id": "7", "content": "wet"}]


# --- readers, at every cut --------------------------------------------------------------------------------------------

TWO = 'One.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": 2}}\n</tool_call>\n'
LATER = '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
ARGUMENTS = '{"city": "Rom", "days": 2}'
OWN = {
    "start_anchor": "A",
    "fields": {
        "content": {},
        "tool_calls": {"open": "<<", "close": ">>", "content": "json", "transform": "{content}", "repeats": True},
    },
}
LIST = '[{"name": "weather", "parameters": {"city": "}]", "days": 2}} , {"name": "now", "parameters": {}}]'
CASES = [
    pytest.param(lambda: TemplateReader(HERMES, []), TWO + LATER, "One.", [("weather", ARGUMENTS), ("now", "{}")]),
    pytest.param(lambda: TemplateReader(HERMES, []), "only text <tool_", "only text <tool_", []),
    pytest.param(lambda: TemplateReader(HERMES, []), "text \n\n", "text \n\n", []),
    pytest.param(lambda: TemplateReader(HERMES, []), "a <tool_call>{bad}</tool_call> b", "a {bad} b", []),
    pytest.param(lambda: TemplateReader(HERMES, []), LATER + "<tool_call>{", "\n{", [("now", "{}")]),
    pytest.param(lambda: TemplateReader(OWN, []), 'a <<{"name": "f", "arguments": "x"}>>', "a", [("f", "x")]),
    pytest.param(lambda: TemplateReader(OWN, []), "a <<{bad", "a {bad", []),
    pytest.param(lambda: TemplateReader(OWN, []), 'a <<{"name": "f"}>> b <<bad>> c', "a b bad> c", [("f", "{}")]),
    pytest.param(lambda: TemplateReader(HERMES, [], ["now"]), LATER + "a" + LATER, "\na", [("now", "{}")] * 2),
    pytest.param(
        lambda: TemplateReader(HERMES, [], ["now"]),
        'a <tool_call>{"name": "sun", "arguments": {}}</tool_call> b',
        'a {"name": "sun", "arguments": {}} b',
        [],
    ),
    pytest.param(
        lambda: JsonReplyReader("[TOOL_CALLS]", ["a"]),
        '[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]',
        '[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]',
        [],
    ),
    pytest.param(lambda: JsonReplyReader("[TOOL_CALLS]", ["a"]), '{"name": "a"}', "", [("a", "{}")]),
    pytest.param(CallListReader, LIST, "", [("weather", '{"city": "}]", "days": 2}'), ("now", "{}")]),
    pytest.param(CallListReader, LIST[:-9], "", [("weather", '{"city": "}]", "days": 2}')]),
    pytest.param(lambda: ArgumentsReader("f"), ARGUMENTS, "", [("f", ARGUMENTS)]),
    pytest.param(
        lambda: JsonReplyReader("<|python_tag|>"),
        '{"name": "now", "parameters": {"a": "é"}}',
        "",
        [("now", '{"a": "é"}')],
    ),
    pytest.param(
        lambda: JsonReplyReader("[TOOL_CALLS]"),
        '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]',
        "",
        [("a", "{}"), ("b", "{}")],
    ),
    pytest.param(lambda: JsonReplyReader("[TOOL_CALLS]"), "[1] is a source", "[1] is a source", []),
    pytest.param(lambda: JsonReplyReader("[TOOL_CALLS]"), " text {", " text {", []),
    pytest.param(lambda: JsonReplyReader("[TOOL_CALLS]"), '{"a": 1}', '{"a": 1}', []),
]
LONG = '{"a": 1e999, "b": "x</tool_call> <tool_call>{", "c": ' + "9" * 5_000 + "}"
"""Marks within a text, and numbers that Python cannot hold."""
CASES += [
    pytest.param(
        lambda: MarkedCallReader("<tool_call>", "</tool_call>"),
        f'One.\n<tool_call>\n{{"name": "f", "arguments": {LONG}}} </tool_call>\n{LATER} two <tool',
        "One.\n two <tool",
        [("f", LONG), ("now", "{}")],
    ),
    pytest.param(lambda: MarkedCallReader("<<", ">>"), 'a <<{"name": "f", "arg', 'a {"name": "f", "arg', []),
    pytest.param(lambda: MarkedCallReader("<<", ">>"), " a \n", " a \n", []),
    pytest.param(CallListReader, f'[{{"name": "f", "parameters": {LONG}}}]', "", [("f", LONG)]),
    pytest.param(
        lambda: JsonReplyReader("[T]", ["f"], re.compile(r"\s*(\[T\])?\s*\[?\{")),
        f'[T] [{{"name": "f", "arguments": {LONG}}} , {{"name": "f", "arguments": {{}}}}] ',
        "",
        [("f", LONG), ("f", "{}")],
    ),
    pytest.param(lambda: JsonReplyReader("[T]", ["f"], re.compile("x")), '{"name": "f"}', '{"name": "f"}', []),
]
DEEP = "[" * 5_000
"""A model that repeats itself; JSON of so many levels cannot be read."""


@pytest.mark.parametrize(
    ("reader", "text", "content"),
    [
        (TemplateReader(HERMES, []), f"a <tool_call>{DEEP}</tool_call>", f"a {DEEP}>"),
        (JsonReplyReader("[TOOL_CALLS]"), DEEP, DEEP),
        (CallListReader(), f'[{{"name": "f", "parameters": {{"a": {DEEP}}}}}', ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_text_that_is_nested_without_end_is_no_call(reader, text, content):
    assert "".join(map(str, [*reader.feed(text), *reader.end()])) == content


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
def test_calls_are_the_same_at_every_cut(make, text, content, calls):
    """Whole, in characters, and in random pieces."""
    choose = random.Random(0)
    cuts = [[], list(range(1, len(text)))]
    cuts += [sorted(choose.sample(range(1, len(text)), choose.randrange(min(6, len(text))))) for _ in range(20)]
    for cut in cuts:
        reader = make()
        pieces = [text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]
        parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end()
        found: dict[int, tuple[str, str]] = {}
        for part in parts:
            if isinstance(part, CallPart):
                assert (part.index in found) == (part.id is None), "the first part of a call has its id and name"
                name, arguments = found.get(part.index, (part.name, ""))
                found[part.index] = (name, arguments + part.arguments)
        assert "".join(part for part in parts if isinstance(part, str)) == content, pieces
        assert [found[i] for i in range(len(found))] == calls, pieces


def test_the_form_of_a_checkpoint_is_that_of_its_tokenizer_or_of_a_family(chat_checkpoint):
    tokens = AddedTokens(Tokenizer.from_file(str(chat_checkpoint / "tokenizer.json")), [0])

    def kinds(chat_template, response_template=None):
        form = native_form(chat_template, response_template, tokens)
        return form and [type(form.reader([], None, is_followed=followed)) for followed in (False, True)]

    assert kinds("... <tool_call> ...") == [TemplateReader, MarkedCallReader] == kinds("", OWN)
    assert kinds("... <tool_call>\n<function=name> ...") == [XmlCallReader] * 2
    assert kinds("[TOOL_CALLS]") == kinds("<|python_tag|>") == [JsonReplyReader] * 2
    assert kinds("{{ messages }}") is None
