"""Reasoning blocks: parted from the answer at every cut, over HTTP with drafts and without, grammars behind them."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from actors.grammars.compiler import GrammarCompiler
from actors.protocol.grammar import Grammar
from cluster.serving.call_forms import HERMES
from cluster.serving.call_readers import TemplateReader
from cluster.serving.chat_template import ChatTemplate
from cluster.serving.message_parts import PartReader
from cluster.serving.reasoning import CLOSE, OPEN, Beginning, ReasoningCount, ReasoningMarks, ReasoningReader
from tests.cluster.serving.conftest import TEMPLATE, RunningServer, serving
from tests.cluster.serving.test_tools import joined
from tests.matrices import in_turn

THINKING = TEMPLATE.replace("{{ message.content }}", "{{ message.reasoning_content }}|{{ message.content }}") + (
    "{% if thinks is defined %}{{ '<think>\n' if thinks else '<think>\n\n</think>\n\n' }}{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
ANSWERS = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", r'\{"n":1\}'),
    Grammar("lark", r'start: "{\"n\":1}"'),
)
OPENED, CLOSED = 255, 256  # tokens

CASES = [
    ("before", "<think>\nwhy\n</think>\n\nThis.", "why", "This."),
    ("before", " \n<think>a</think>b\n", "a", "b\n"),
    ("before", "<think></think>b", "", "b"),
    ("before", "  No block: </think>.", "", "  No block: </think>."),
    ("before", " <thin", "", " <thin"),
    ("before", "<think> no end </th", "no end </th", ""),
    ("before", "<think>a </ think> b</think> <think>c</think>", "a </ think> b", "<think>c</think>"),
    ("inside", "\n a  b \n</think>\n c", "a  b", "c"),
    ("inside", " cut \n", "cut", ""),
    ("inside", "<</think></think>", "<", "</think>"),
    ("after", " <think>as it is", "", " <think>as it is"),
]


def pieces_of(text: str) -> Iterator[list[str]]:
    """Whole, in characters, and cut at random."""
    choose = random.Random(0)
    for cut in [[], list(range(1, len(text)))] + [sorted(choose.sample(range(1, len(text)), 4)) for _ in range(20)]:
        yield [text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]


@pytest.mark.parametrize(("beginning", "text", "reasoning", "answer"), CASES)
def test_a_block_ends_where_its_mark_stands_at_every_cut(beginning, text, reasoning, answer):
    for pieces in pieces_of(text):
        reader = ReasoningReader(Beginning[beginning])
        parts = [reader.feed(piece) for piece in pieces] + [reader.end()]
        assert ("".join(a for a, _ in parts), "".join(b for _, b in parts)) == (reasoning, answer), pieces


def test_calls_are_found_in_the_answer_alone():
    text = (
        '<think>a <tool_call>{"name": "x"}</tool_call></think>\nb<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    )
    for pieces in pieces_of(text):
        reader = PartReader(ReasoningReader(Beginning.before), TemplateReader(HERMES, []))
        fed = [reader.feed(piece, is_last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
        parts = [part for _, parts in fed for part in parts]
        assert "".join(reasoning for reasoning, _ in fed) == 'a <tool_call>{"name": "x"}</tool_call>'
        assert "".join(part for part in parts if isinstance(part, str)) == "b"
        assert [part.name for part in parts if not isinstance(part, str)] == ["f"]


def thinking_tokenizer(path: Path, *, special: bool = False) -> Tokenizer:
    """That of the tiny checkpoint, where two tokens are the marks in place of bytes that no text here has."""
    content = json.loads((path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {name: token for name, token in vocabulary.items() if token not in (OPENED, CLOSED)}
    shared = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=special)
    content["added_tokens"] += [{"id": OPENED, "content": OPEN, **shared}, {"id": CLOSED, "content": CLOSE, **shared}]
    return Tokenizer.from_str(json.dumps(content))


def test_the_end_of_a_prompt_tells_how_its_reply_begins(chat_checkpoint):
    plain = Tokenizer.from_file(str(chat_checkpoint / "tokenizer.json"))
    marks = ReasoningMarks(plain, THINKING)
    assert marks.beginning("[user]<think>[assistant]") is Beginning.before
    assert marks.beginning("[assistant]<think>\n") is Beginning.inside
    assert marks.beginning("[assistant]<think>\n\n</think>\n\n") is Beginning.after
    assert ReasoningMarks(plain, TEMPLATE).beginning("[assistant]<think>\n") is Beginning.after
    unseen = ReasoningMarks(thinking_tokenizer(chat_checkpoint, special=True), THINKING)
    assert unseen.beginning("[assistant]<think>\n") is Beginning.after, "texts of replies have no special tokens"
    assert unseen.beginning("[assistant]<think>\na", "<think>\na") is Beginning.after


def test_a_message_that_goes_on_tells_it_by_its_own_text(chat_checkpoint):
    marks = ReasoningMarks(Tokenizer.from_file(str(chat_checkpoint / "tokenizer.json")), THINKING)
    places = {"a": "after", "<think>a</think>\nb": "after", "<think>a": "within", "<think>a</think><think>": "within"}
    for content, beginning in places.items():
        assert marks.beginning(f"[user]<think>[assistant]{content}", content) is Beginning[beginning]
    assert marks.beginning("[user]a[assistant] ", " ") is Beginning.before


def test_a_block_that_goes_on_keeps_the_white_space_before_its_rest():
    for pieces in pieces_of(" b c </think>\n d"):
        reader = ReasoningReader(Beginning.within)
        parts = [reader.feed(piece) for piece in pieces] + [reader.end()]
        assert ("".join(a for a, _ in parts), "".join(b for _, b in parts)) == (" b c", "d")


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_grammar_holds_for_the_answer(chat_checkpoint, has_tokens, answer):
    tokenizer = Tokenizer.from_file(str(chat_checkpoint / "tokenizer.json"))
    tokenizer = thinking_tokenizer(chat_checkpoint) if has_tokens else tokenizer
    marks = ReasoningMarks(tokenizer, THINKING)
    compiler = GrammarCompiler(tokenizer.to_str, [0])
    assert marks.grammar(None, Beginning.before) is None and marks.grammar(answer, Beginning.after) is answer
    texts = {
        Beginning.before: ['{"n":1}', '<think>{"n":22} "x\n</think>\n\n{"n":1}', '<think></think>{"n":1}'],
        Beginning.inside: ['a </ b</think>{"n":1}', '\n</think> \n{"n":1}'],
    }
    wrong = {
        Beginning.before: ["a", '<think>a</think>{"n":3}', '<think>a{"n":1}', '<think>a</think></think>{"n":1}'],
        Beginning.inside: ['{"n":1}', '<think>{"n":1}'],
    }
    texts[Beginning.within], wrong[Beginning.within] = texts[Beginning.inside], wrong[Beginning.inside]
    for beginning, right in texts.items():
        whole = marks.grammar(answer, beginning)
        assert whole is not None
        matcher = compiler.matcher(whole)
        for text in right + wrong[beginning]:
            tokens = tokenizer.encode(text).ids
            one = matcher.deep_copy()
            is_whole = one.try_consume_tokens(tokens) == len(tokens) and one.is_accepting()
            assert is_whole == (text in right), text
        opens = "<think>" if beginning is Beginning.before else ""
        for rest, is_right in (('{"n":1}', True), ('{"n":3}', False), ("a", False)):  # a mark of other tokens
            tokens = tokenizer.encode(opens).ids + [one for mark in f"a{CLOSE}" for one in tokenizer.encode(mark).ids]
            tokens += tokenizer.encode(rest).ids
            assert (matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)) == is_right, rest


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(chat_checkpoint, half_agreeing_drafter, tmp_path_factory):
    path, drafter = [tmp_path_factory.mktemp("models") / name for name in ("thinking", "drafter")]
    for copy, original in ((path, chat_checkpoint), (drafter, half_agreeing_drafter)):
        shutil.copytree(original, copy)
        thinking_tokenizer(chat_checkpoint).save(str(copy / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>", "chat_template": THINKING}))
    with serving(path, drafter) as running:
        yield running


BODY: dict[str, Any] = {
    "model": "thinking",
    "messages": [{"role": "user", "content": "q"}],
    "max_tokens": 200,
    "temperature": 1.0,
    "logit_bias": {CLOSED: 3.0},
}


def streamed(client, **body):
    chunks = list(client.chat.completions.create(**body, stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    return "".join(getattr(delta, "reasoning", None) or "" for delta in deltas), *joined(chunks)


@pytest.mark.extended
@pytest.mark.parametrize("seed", list(in_turn(range(4), times={1: 0, 2: 0, 3: 0})))
def test_a_reply_has_reasoning_and_content_streamed_or_not_with_drafts_or_not(client, seed):
    body = {**BODY, "seed": seed, "extra_body": {"chat_template_kwargs": {"thinks": True}}}
    (choice,) = client.chat.completions.create(**body).choices
    assert choice.message.reasoning and choice.message.content, "seeds whose blocks end are to be chosen"
    assert streamed(client, **body) == (choice.message.reasoning, choice.message.content, [], choice.finish_reason)
    body["extra_body"] = body["extra_body"] | {"speculative": {"enabled": False}}
    (plain,) = client.chat.completions.create(**body).choices
    assert plain.message == choice.message


@pytest.mark.extended
def test_reasoning_is_left_out_on_request(client):
    """And counts as it did."""
    body = {**BODY, "seed": 1, "extra_body": {"chat_template_kwargs": {"thinks": True}}}
    whole = client.chat.completions.create(**body)
    body["extra_body"] = body["extra_body"] | {"include_reasoning": False}
    silent = client.chat.completions.create(**body)
    (choice,), (said,) = whole.choices, silent.choices
    assert choice.message.reasoning and not hasattr(said.message, "reasoning")
    assert silent.usage.completion_tokens == whole.usage.completion_tokens
    assert (said.message.content, said.finish_reason) == (choice.message.content, choice.finish_reason)
    assert streamed(client, **body) == ("", said.message.content, [], said.finish_reason)


def test_a_block_that_the_template_closed_leaves_an_answer_alone(client):
    body = {**BODY, "logit_bias": {}, "seed": 1, "extra_body": {"chat_template_kwargs": {"thinks": False}}}
    (choice,) = client.chat.completions.create(**{**body, "max_tokens": 20}).choices
    assert choice.message.content and not hasattr(choice.message, "reasoning")


@pytest.mark.extended
@pytest.mark.parametrize(("asked", "seed"), list(in_turn(["format", "tools"], range(3), times={"format": 0})))
def test_what_a_grammar_prescribes_begins_behind_the_block(client, seed, asked):
    """By default of calls, whose grammar is the wider one."""
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    fields = {"format": {"response_format": FORMAT}, "tools": {"tools": [tool], "tool_choice": "required"}}[asked]
    fields |= {"parallel_tool_calls": False} if asked == "tools" else {}
    body = {**BODY, "seed": seed, **fields, "extra_body": {"chat_template_kwargs": {"thinks": True}}}
    (choice,) = client.chat.completions.create(**body).choices
    message = choice.message
    assert message.reasoning
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    if asked == "format":
        jsonschema.validate(json.loads(message.content), SCHEMA)
        assert not calls
    else:
        ((name, arguments),) = calls
        jsonschema.validate(json.loads(arguments), SCHEMA)
        assert (name, message.content, choice.finish_reason) == ("f", None, "tool_calls")
    assert streamed(client, **body) == (message.reasoning, message.content or "", calls, choice.finish_reason)


@pytest.mark.parametrize(
    ("enabled", "stop"),
    [
        (False, ["</thinking>", "</think>\x00"]),
        pytest.param(True, None, marks=pytest.mark.extended),
    ],  # late, or at once
)
def test_tokens_of_reasoning_are_counted_exactly(client, server: RunningServer, enabled, stop):
    """In all choices together, whole or in a stream, and where the text of the mark comes later than its tokens."""
    extra = {"chat_template_kwargs": {"thinks": True}, "return_token_ids": True, "speculative": {"enabled": enabled}}
    body = {**BODY, "seed": 1, "n": 2, "stop": stop, "extra_body": extra}
    whole = client.chat.completions.create(**body)
    wanted = [choice.token_ids.index(CLOSED) + 1 for choice in whole.choices]
    assert whole.usage.completion_tokens_details.reasoning_tokens == sum(wanted) < whole.usage.completion_tokens
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    sent = dict.fromkeys(range(2), 0)
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            sent[choice.index] += len(getattr(choice, "token_ids", ()))
        counted = chunk.usage.completion_tokens_details.reasoning_tokens
        inside = sum(min(num, most) for num, most in zip(sent.values(), wanted, strict=True))
        assert inside <= counted <= inside + 16 * (stop is not None), "what is held back is still of the block"
    assert counted == sum(wanted)


def test_a_reply_without_a_block_has_no_tokens_of_reasoning(client):
    for thinks, cut in ((False, 20), (True, 1)):
        extra = {"chat_template_kwargs": {"thinks": thinks}}
        body = {**BODY, "logit_bias": {}, "seed": 1, "max_tokens": cut, "extra_body": extra}
        usage = client.chat.completions.create(**body).usage
        assert usage.completion_tokens_details.reasoning_tokens == thinks, "a block that is cut is all of the reply"
    completion = client.completions.create(model="thinking", prompt="a", max_tokens=1)
    assert completion.usage.completion_tokens_details is None


@pytest.mark.parametrize(
    ("beginning", "text", "num"),
    [
        ("before", "<think>ab</think>c", 17),
        ("before", " <think>a", 9),
        ("before", " <thin", 0),
        ("before", "a</think>", 0),
        ("inside", "a</think>b</think>", 9),
        ("within", "a</think>", 9),
        ("after", "<think>a</think>", 0),
    ],
)
@pytest.mark.parametrize("delay", [0, 1, 5])
def test_the_count_of_a_block_does_not_depend_on_when_its_text_comes(beginning, text, num, delay):
    """Characters are the tokens here; the text of each comes `delay` tokens later."""
    characters = [*map(ord, text), *[ord("x")] * delay]
    count = ReasoningCount(Beginning[beginning], lambda tokens: "".join(map(chr, tokens)))
    for place in range(1, len(characters) + 1):
        shown = chr(characters[place - 1 - delay]) if place > delay else ""
        count.feed(characters[:place], [(place, shown)])
    is_open = num == len(text) and CLOSE not in text
    assert count.num == num + is_open * delay


def test_the_template_is_given_the_reasoning_of_earlier_messages(server: RunningServer):
    earlier = [{"role": "assistant", "content": "b", name: "a"} for name in ("reasoning", "reasoning_content")]
    for message in earlier:
        status, _, body = server.ask("/tokenize", {"messages": [{"role": "user", "content": "q"}, message]})
        assert status == 200 and "[assistant]a|b" in server.engine.tokenizer.decode(body["tokens"])
    wrong = {"role": "user", "content": "b", "reasoning": "a"}
    status, _, body = server.ask("/v1/chat/completions", {"messages": [wrong]})
    assert (status, body["error"]["message"]) == (400, "messages.0: reasoning: is written by the role assistant alone")


# --- effort -----------------------------------------------------------------------------------------------------------

READS = {
    "degrees": "{% set e = reasoning_effort or 'medium' %}{{ e }}",
    "switch": "{% if enable_thinking is defined and not enable_thinking %}off{% else %}on{% endif %}",
    "both": "{{ reasoning_effort }}{% for m in messages %}{{ thinking }}{% endfor %}",
    "neither": "{% set reasoning_effort = 'high' %}{{ reasoning_effort }}{{ messages[0].enable_thinking }}",
}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def test_an_effort_is_what_the_template_reads_of_it():
    found = {}
    for kind, source in READS.items():
        template = ChatTemplate(source, {})
        for effort in EFFORTS:
            with contextlib.suppress(ValueError):
                found[kind, effort] = template.names_of_effort(effort)
    named = {effort: {"reasoning_effort": effort} for effort in EFFORTS}
    assert {effort: found["degrees", effort] for effort in EFFORTS} == named
    assert {effort: found["both", effort] for effort in EFFORTS} == {
        effort: {**names, "thinking": effort != "none"} for effort, names in named.items()
    }
    left = {key: names for key, names in found.items() if key[0] in ("switch", "neither")}
    assert left == {("switch", "none"): {"enable_thinking": False}}
    for kind, line in (("switch", "turns reasoning on or off"), ("neither", "does not read it; leave it out")):
        with pytest.raises(ValueError, match=f"^reasoning_effort: the checkpoint's chat template {line}"):
            ChatTemplate(READS[kind], {}).names_of_effort("low")


def test_the_template_is_given_the_effort(server: RunningServer, monkeypatch):
    """Of a chat and of one that is tokenised alone; what would be ignored is refused."""
    fields: dict[str, Any] = {"messages": BODY["messages"], "reasoning_effort": "none"}

    def written(kind, **more):
        monkeypatch.setattr(server.service._model, "_template", ChatTemplate(READS[kind] + "x", {}))
        status, _, reply = server.ask("/tokenize", {**fields, **more})
        chat = server.ask("/v1/chat/completions", {**fields, **more, "max_tokens": 1})
        assert chat[0] == status
        if status != 200:
            assert chat[2]["error"] == reply["error"]
            return status, reply["error"]["param"]
        assert chat[2]["usage"]["prompt_tokens"] == reply["count"]
        return server.engine.tokenizer.decode(reply["tokens"])

    assert written("degrees") == "nonex" and written("degrees", reasoning_effort="low") == "lowx"
    assert written("switch") == "offx" and written("both", reasoning_effort="max") == "maxTruex"
    assert written("switch", reasoning_effort=None) == "onx"
    for kind, effort in (("neither", "none"), ("neither", "high"), ("switch", "high")):
        assert written(kind, reasoning_effort=effort) == (400, "reasoning_effort")
    for wrong in ("", "lots", 1, ["low"]):
        assert written("degrees", reasoning_effort=wrong) == (400, "reasoning_effort")
    same, other = ({"chat_template_kwargs": {"reasoning_effort": one}} for one in ("none", "low"))
    assert written("degrees", **same) == "nonex" and written("degrees", **other) == (400, "chat_template_kwargs")
    assert written("switch", chat_template_kwargs={"enable_thinking": True}) == (400, "chat_template_kwargs")
