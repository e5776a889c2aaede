"""Calls in the form of Qwen3-Coder: what a parameter's text means and may be by its schema, read at every cut, and
over HTTP."""

from __future__ import annotations

import json
import random
import re
import shutil
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from actors.grammars.masks import TextMatcher
from cluster.serving.added_tokens import AddedTokens
from cluster.serving.call_readers import CallPart
from cluster.serving.tools import ToolDefinition
from cluster.serving.xml_calls import XmlForm
from cluster.serving.xml_parameters import RawParameters, UnwritableError
from tests.cluster.serving.conftest import TEMPLATE, serving
from tests.cluster.serving.test_call_forms import END, matcher_of, read, tokenizer_of
from tests.cluster.serving.test_grammars import random_schema
from tests.cluster.serving.test_reasoning import pieces_of
from tests.cluster.serving.test_tools import joined, whole_of

COLOUR = {"type": "string", "enum": ["red", "sea green"]}
TEXT, NULL, LIST = {"type": "string"}, {"type": "null"}, {"type": "array", "items": {"type": "integer"}}
PLACES = {"type": "object", "properties": {"at": {"$ref": "#/$defs/spot"}}, "additionalProperties": False}


def parameters(schema: Any, **more: Any) -> dict[str, Any]:
    spot = {"enum": ["here", "there"]}
    return {"type": "object", "properties": {"k": schema}, "required": ["k"], "$defs": {"spot": spot}, **more}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXT, "a\n b ", "a\n b "),
        *[(TEXT, text, text) for text in ("", "\n", "12", "null", '"quoted"', "{}", "é\t")],
        *[({"type": "integer"}, text, 12) for text in ("12", " 12 ")],
        ({"type": "integer"}, "twelve", "twelve"),
        *[({"type": "boolean"}, text, True) for text in ("true", "True")],
        *[(NULL, text, None) for text in ("null", "None")],
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "object"}, ' {"a": [1, {}]}', {"a": [1, {}]}),
        ({"type": "object"}, "{a}", "{a}"),
        ({"$ref": "#/$defs/spot"}, "12", "12"),
        ({"anyOf": [TEXT, NULL]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [TEXT, {"type": "integer"}]}, "12", 12),
        ({"anyOf": [TEXT, {"type": "integer"}]}, "1.5", "1.5"),
        ({"anyOf": [TEXT, {"type": "number"}]}, "1.5", 1.5),
        *[({"anyOf": [TEXT, LIST]}, text, value) for text, value in (("[1]", [1]), ("[a]", "[a]"), ("{}", "{}"))],
        *[({}, text, value) for text, value in (("12", "12"), ("[1]", [1]), ("[a]", "[a]"), ("true", "true"))],
        ({"type": "integer", "not": {"const": 3}}, "4", 4),
        ({"enum": ["1", 1, "a"]}, "1", 1),
    ],
)
def test_a_text_is_what_its_schema_says(schema, text, value):
    assert json.loads(RawParameters(parameters(schema)).read("k", text)) == value


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (TEXT, ["", "a\n\nb", "</parameter>", "\n", "<function=f>"], []),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\né", "123"], ["", "a", "abcd"]),
        (COLOUR, ["red", "sea green"], ["blue", "", "redd", '"red"']),
        ({"$ref": "#/$defs/spot"}, ["here", "there"], ["her", "where"]),
        ({"allOf": [{"$ref": "#/$defs/spot"}], "description": "x"}, ["here"], ["where"]),
        ({"oneOf": [{"const": "a"}, {"const": "b/c"}]}, ["a", "b/c"], ["b", "ab/c"]),
        ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "1.5", "a", ""]),
        ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
        ({"anyOf": [TEXT, NULL]}, ["null", "", "nul", "[1]"], []),
        ({"anyOf": [COLOUR, NULL]}, ["null", "red"], ["None", ""]),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}, ["ab", "1234", "-5"], ["abc", "1.5"]),
        ({"anyOf": [TEXT, LIST]}, ["[1, 2]", "text", "{}", "12"], ["[a]", "[1.5]"]),
        ({"type": ["string", "object"], "minLength": 1}, ["a", '{"a": 1}'], ["", "{a}"]),
        ({"enum": ["1", 1, "a", [1], None]}, ["1", "a", "[1]", "null"], ["2", "[]", "b"]),
        (PLACES, ['{"at": "here"}', "{}"], ['{"at": "home"}', '{"b": 1}']),
        ({"anyOf": [PLACES, {"type": "string", "maxLength": 3}]}, ['{"at":"here"}', "abc"], ['{"at":1}', "abcd"]),
        ({}, ["12", "[a", "text"], []),
        ({"type": "string", "format": "date"}, ["text"], []),
    ],
)
def test_a_text_follows_its_schema(chat_checkpoint, schema, allowed, refused):
    """What is allowed is read as a value of it; `format` is held by no text, and refused with `strict`."""
    tokenizer = tokenizer_of(chat_checkpoint, "xml", has_tokens=True)
    whole, is_strict = parameters(schema, additionalProperties=False), "format" not in schema
    function = {"name": "f", "parameters": whole, "strict": is_strict}
    tools = [ToolDefinition.model_validate({"type": "function", "function": function})]
    form = XmlForm(AddedTokens(tokenizer, [END]))
    begun = matcher_of(tokenizer, form.grammar(tools, is_parallel=True))
    for text in [*allowed, *refused]:
        call = f"<tool_call>\n<function=f>\n<parameter=k>\n{text}\n</parameter>\n</function>\n</tool_call>"
        tokens, matcher = tokenizer.encode(call, add_special_tokens=False).ids, begun.deep_copy()
        is_whole = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert is_whole == (text in allowed), text
        if is_whole:
            ((_, arguments),) = read(form.reader(tools, None, is_followed=True), call)
            jsonschema.validate(json.loads(arguments), whole)


@pytest.mark.parametrize(
    ("schema", "line"),
    [
        (parameters({"type": "string", "pattern": "a+"}), "k: pattern of a text"),
        (parameters({"type": "string", "format": "date"}), "k: format of a text"),
        (parameters({"anyOf": [TEXT, {"type": "integer", "minimum": 3}]}), "k: a text beside numbers"),
        (parameters({"anyOf": [TEXT, {"const": 3}]}), "k: a text beside numbers"),
        (parameters({"not": TEXT}), "k: not "),
        (parameters({"allOf": [TEXT, {"maxLength": 3}]}), "k: allOf of several"),
        (parameters({"oneOf": [TEXT, COLOUR]}), "k: oneOf of texts"),
        (parameters({"oneOf": [TEXT, {"type": "integer"}, {"type": "number"}]}), "k: oneOf of texts"),
        (parameters({"enum": ["a\n</parameter>"]}), "k: some of its values"),
        (parameters({"$ref": "#/$defs/none"}), "k: the reference"),
        (parameters({"$ref": "#/properties/k"}), "k: a schema that is none"),
        ({"type": "object", "properties": {"a>b": TEXT}}, "the name 'a>b'"),
        ({"type": "object", "minProperties": 1}, "minProperties cannot be held"),
        ({"const": {"a": 1}}, "arguments that are not one object"),
        ({"anyOf": [parameters(TEXT), parameters(LIST)]}, "arguments that are not one object"),
    ],
)
def test_what_no_text_can_be_held_to_is_named(schema, line):
    """And without `strict` the rest of the function is held."""
    with pytest.raises(UnwritableError, match=re.escape(line)):
        RawParameters(schema, is_strict=True)
    assert json.loads(RawParameters(schema).read("k", "a")) == "a"


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 41))])
def test_whatever_is_written_for_a_random_schema_is_valid(chat_checkpoint, part):
    """25 functions each of two parameters, strict or refused; any tokens that the grammar allows."""
    tokenizer = tokenizer_of(chat_checkpoint, "xml", has_tokens=True)
    choose, form, num_read = random.Random(part), XmlForm(AddedTokens(tokenizer, [END])), 0
    for _ in range(25 if part else 10):
        fields = {name: random_schema(choose, 2) for name in ("a", "b c")}
        extra = choose.choice([True, False])
        schema = {"type": "object", "properties": fields, "required": ["a"], "additionalProperties": extra}
        function = {"name": "f", "parameters": schema, "strict": True}
        tools = [ToolDefinition.model_validate({"type": "function", "function": function})]
        try:
            matcher = matcher_of(tokenizer, form.grammar(tools, is_parallel=False))
        except UnwritableError:
            continue
        tokens = tokenizer.encode("<function=f>", add_special_tokens=False).ids
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        while not matcher.is_accepting() and len(tokens) < 400:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            likely = [one for one in np.flatnonzero(bits[: tokenizer.get_vocab_size()]).tolist() if one != END]
            forced = matcher.compute_ff_tokens()
            tokens.append(forced[0] if forced else choose.choice(likely))
            assert matcher.consume_token(tokens[-1])
        calls = read(form.reader(tools, None, is_followed=True), tokenizer.decode(tokens))
        assert len(calls) == matcher.is_accepting()
        for _, arguments in calls:
            jsonschema.validate(json.loads(arguments), schema)
        num_read += len(calls)
    assert num_read > 5


# --- readers, at every cut --------------------------------------------------------------------------------------------

FIELDS = {"path": TEXT, "count": {"type": "integer"}, "tags": LIST}
TOOLS = [
    ToolDefinition.model_validate({"type": "function", "function": {"name": name, **more}})
    for name, more in (("edit", {"parameters": {"type": "object", "properties": FIELDS}}), ("edits", {}), ("now", {}))
]
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>\n"
EDIT = (
    "<function=edit>\n<parameter=path>\n a\n\n</parameter>\n<parameter=count>\n2\n</parameter>\n"
    "<parameter=tags>\n[1,\n2]\n</parameter>\n</function>\n"
)
EDITED = '{"path": " a\\n", "count": 2, "tags": [1,\n2]}'
CASES = [
    (f"One.\n<tool_call>\n{EDIT}</tool_call>\n{NOW}", "One.", [("edit", EDITED), ("now", "{}")]),
    (f"One.\n\n{EDIT}</tool_call>\n two <tool", "One.\n two <tool", [("edit", EDITED)]),
    (f"{EDIT}{EDIT}three", "\nthree", [("edit", EDITED)] * 2),
    ("only text <tool_", "only text <tool_", []),
    ("text \n\n", "text \n\n", []),
    (f"a <function=sun>\n</function> b {NOW}", "a <function=sun>\n</function> b", [("now", "{}")]),
    ("a <tool_call>\n<function=ed", "a <tool_call>\n<function=ed", []),
    ("a <tool_call>{} <function=edit> text", "a <tool_call>{} <function=edit> text", []),
    ("<function=edit>\ntext</function>", "<function=edit>\ntext</function>", []),
    ("<function=edit>\n<parameter=\n></function> b", "<function=edit>\n<parameter=\n></function> b", []),
    (EDIT[:-20], EDIT[:-20].rstrip(), []),
    (f"{EDIT[:-20]}\n", f"{EDIT[:-20]}\n", []),
    (
        "<function=edit>\n<parameter=path>\n</function> </tool_call></parameter>\n</parameter>\n</function>",
        "",
        [("edit", '{"path": "</function> </tool_call></parameter>"}')],
    ),
]
FREE = [
    (
        "<tool_call><function=edit><parameter=path>a</parameter> <parameter=count>2</parameter></function></tool_call>",
        "",
        [("edit", '{"path": "a", "count": 2}')],
    ),
    (
        "<function=edit>\n<parameter=path>\n<parameter=a>1</parameter> text\n</parameter>\n</function>",
        "",
        [("edit", '{"path": "<parameter=a>1</parameter> text"}')],
    ),
    (
        "<function=edit>\n<parameter=path>\na</parameter>\n<parameter=path>\nb\n</parameter>\n</function>",
        "",
        [("edit", '{"path": "b"}')],
    ),
    (f"<function=edits>\n<parameter=a>\n{'[' * 5_000}\n</parameter>\n</function>", None, []),
]


@pytest.mark.parametrize("is_followed", [True, False], ids=["followed", "free"])
@pytest.mark.parametrize(("text", "content", "calls"), [*CASES, *FREE])
def test_calls_are_the_same_at_every_cut(text, content, calls, is_followed):
    """What no grammar writes is only read where none has to."""
    if is_followed and (text, content, calls) in FREE:
        return
    for pieces in pieces_of(text):
        reader = XmlForm(AddedTokens(Tokenizer.from_str(EMPTY), [])).reader(TOOLS, None, is_followed=is_followed)
        parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end()
        found = [part for part in parts if isinstance(part, CallPart)]
        assert "".join([part for part in parts if isinstance(part, str)]) == (text if content is None else content)
        assert [(part.name, part.arguments) for part in found] == calls, pieces
        assert [part.index for part in found] == [*range(len(calls))]


EMPTY = json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}})


def test_only_functions_that_may_be_called_are():
    reader = XmlForm(AddedTokens(Tokenizer.from_str(EMPTY), [])).reader(TOOLS, ["edit"], is_followed=False)
    assert read(reader, NOW + EDIT) == [("edit", EDITED)]


# --- over HTTP --------------------------------------------------------------------------------------------------------

XML_TEMPLATE = TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\n{{ value if value is string else "
    "value | tojson | safe }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
)
BODY: dict[str, Any] = {"model": "xml", "messages": [{"role": "user", "content": "q"}], "max_tokens": 250}
CALLABLE = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}


def tool(name: str, schema: dict[str, Any], **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


@pytest.fixture(scope="module")
def server(chat_checkpoint, half_agreeing_drafter, tmp_path_factory):
    path, drafter = [tmp_path_factory.mktemp("models") / name for name in ("xml", "drafter")]
    for copy, original in ((path, chat_checkpoint), (drafter, half_agreeing_drafter)):
        shutil.copytree(original, copy)
        tokenizer_of(chat_checkpoint, "xml", has_tokens=True).save(str(copy / "tokenizer.json"))
    settings = {"bos_token": "<|endoftext|>", "chat_template": XML_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with serving(path, drafter) as running:
        yield running


@pytest.fixture(scope="module")
def body(server) -> dict[str, Any]:
    """The mark of a call is likely."""
    opens = server.engine.tokenizer.token_to_id("<tool_call>")
    return {**BODY, "temperature": 1.0, "logit_bias": {str(opens): 6}}


@pytest.mark.parametrize("seeds", [(0, 1), pytest.param((2, 3), marks=pytest.mark.extended)], ids=str)
def test_calls_follow_their_schemas_streamed_or_not_drafted_or_not(client, body, monkeypatch, seeds):
    monkeypatch.setattr(TextMatcher, "_compiled", lambda matcher: matcher._compiling.result(60))
    tools, num_calls = [tool("f", CALLABLE, strict=True), tool("g", {"type": "object", "properties": {}})], 0
    for seed in seeds:
        asked = {**body, "tools": tools, "seed": seed, "parallel_tool_calls": seed % 2 == 0}
        (choice,) = client.chat.completions.create(**asked).choices
        content, calls, reason = whole_of(choice)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), CALLABLE if name == "f" else {"type": "object"})
        assert reason == "length" or (reason == "tool_calls") == bool(calls)
        assert joined(client.chat.completions.create(**asked, stream=True)) == (content, calls, reason)
        plain = client.chat.completions.create(**asked, extra_body={"speculative": {"enabled": False}})
        assert whole_of(plain.choices[0]) == (content, calls, reason)
        num_calls += len(calls)
    assert num_calls > 0


def test_a_call_goes_back_as_the_template_writes_it(client, server, body):
    """And what the model writes next is the same as in the text of the prompt."""
    asked = {**body, "tools": [tool("f", CALLABLE)], "parallel_tool_calls": False, "seed": 1}
    called = client.chat.completions.create(**asked).choices[0].message
    (call,) = called.tool_calls
    messages = [*BODY["messages"], called.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    _, _, reply = server.ask("/tokenize", {"messages": messages, "model": "xml"})
    text = server.engine.tokenizer.decode(reply["tokens"], skip_special_tokens=False)
    arguments = json.loads(call.function.arguments)
    written = "".join([f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()])
    assert f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>" in text


def test_strict_is_refused_where_a_text_cannot_be_held(server):
    dated = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    for strict, status in ((True, 400), (False, 200)):
        asked = {**BODY, "max_tokens": 2, "tools": [tool("f", dated, strict=strict)]}
        found, _, reply = server.ask("/v1/chat/completions", asked)
        assert found == status, reply
        if strict:
            line = "tools: f: day: format of a text cannot be held in this model's form of calls"
            assert (reply["error"]["message"], reply["error"]["param"]) == (line, "tools")
