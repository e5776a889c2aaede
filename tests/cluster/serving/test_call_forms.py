"""Calls that the model decides on: what their grammar lets it write, and that all that is read follows the schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from actors.grammars.compiler import GrammarCompiler
from actors.protocol.grammar import Grammar
from cluster.serving.added_tokens import AddedTokens
from cluster.serving.call_forms import CallForm, native_form
from cluster.serving.call_readers import CallPart, CallReader
from cluster.serving.message_parts import PartReader
from cluster.serving.reasoning import Beginning, ReasoningMarks, ReasoningReader
from cluster.serving.tools import ToolDefinition
from tests import matrices
from tests.cluster.serving.test_reasoning import THINKING
from tests.matrices import in_turn

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 30}},
}
TOOLS = [
    ToolDefinition.model_validate({"type": "function", "function": {"name": name, **more}})
    for name, more in (("weather", {"parameters": WEATHER}), ("now", {}))
]
SCHEMAS = {tool.function.name: tool.function.schema_of_arguments for tool in TOOLS}
END = 0
MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "xml": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]",),
    "llama": ("<|python_tag|>",),
}
SHOWN_BY = {family: marks[0] for family, marks in MARKS.items()} | {"xml": "<tool_call>\n<function="}
"""Chat templates that have each form."""
KEYS = {"hermes": "arguments", "xml": "", "mistral": "arguments", "llama": "parameters"}
FORMS = [(family, has_tokens) for family in MARKS for has_tokens in (True, False)]
NUM_TEXTS = 150 if matrices.is_whole else 60
HIDDEN, SHOWN = "<|hidden|>", "<|shown|>"
FREED = range(240, 256)  # bytes that no text here has

GOOD = '{"name": "weather", "KEY": {"city": "Rom", "days": 2}}'
BAD = '{"name": "weather", "KEY": {"city": "Rom", "days": 20}}'
CITY, NO_DAYS = "<parameter=city>\nRom\n</parameter>\n", "<function=now>\n</function>\n"
XML = f"<function=weather>\n{CITY}<parameter=days>\n2\n</parameter>\n</function>\n"
BAD_XML = XML.replace("2", "20")
ALLOWED = {
    "xml": [
        *(
            "",
            "only text",
            "a <tool_ca",
            "</tool_call>",
            f"a {SHOWN} b <tool_call>\n{XML}</tool_call>",
            "<function=sun>",
        ),
        f"a<tool_call>\n{XML}</tool_call>\n<tool_call>\n{XML}</tool_call> b",
        *(f"<tool_call>\n{NO_DAYS}</tool_call>", f"{XML}</tool_call>", f"a\n{XML}</tool_call>\n{XML}</tool_call>"),
        f"{XML.replace('Rom', '<a></parameter> <function=now>')}</tool_call>",
        f"{XML.replace(CITY, '')}</tool_call>",
    ],
    "hermes": [
        *("", "only text", "a <tool_ca", "</tool_call>", f"a {SHOWN} b <tool_call>{GOOD}</tool_call>"),
        f"a<tool_call>\n{GOOD}\n</tool_call>\n<tool_call>{GOOD}</tool_call> b",
        '<tool_call>{"name": "now", "KEY": {}}</tool_call>',
    ],
    "mistral": [
        *("", "only text", "[1] is a source", '{"name": "sun"}', "{", GOOD, f"[TOOL_CALLS] [{GOOD}, {GOOD}]"),
        '{"arguments": {"days": 20}, "name": "weather"}',
        *(f"[{GOOD}]", f"a {GOOD}", f"text [TOOL_CALLS] {BAD}", f"{HIDDEN}{GOOD}", f"a{HIDDEN}b{BAD}"),
    ],
    "llama": [
        *("", "only text", "{}", f"<|python_tag|>{GOOD}", f" {GOOD} ", '{"type": "function", ' + GOOD[1:]),
        f"[{GOOD}]",
    ],
}
REFUSED = {
    "xml": [
        *("<tool_call> text", "<tool_call>\n<function=sun>", f"<tool_call>{XML}</tool_call>", f"<tool_call>\n{HIDDEN}"),
        *(f"<tool_call>\n{BAD_XML}</tool_call>", f"{BAD_XML}</tool_call>", f"{XML}text", f"a {HIDDEN}", XML),
        *(f"{XML.replace('days', 'hours')}</tool_call>", f"<function=now>\n{CITY}", f"{XML.replace('Rom', 'x' * 31)}"),
        f"<function=weather>\n{CITY}</function>\n</tool_call>",
    ],
    "hermes": [
        *("<tool_call> text", f"<tool_call>{BAD}</tool_call>", '<tool_call>{"name": "sun"', f"<tool_call>{HIDDEN}"),
        f"a {HIDDEN}",
    ],
    "mistral": [
        *(BAD, f"[{GOOD}, {BAD}]", f"[TOOL_CALLS] {BAD}", f"[TOOL_CALLS] [{BAD}]", f"{HIDDEN}{BAD}", f"{{{HIDDEN}"),
        *(f"{GOOD} a", '{"name": "now", "arguments": {"a": 1}}'),
    ],
    "llama": [
        *(BAD, f"<|python_tag|>{BAD}", f"{HIDDEN}<|python_tag|>{BAD}", '{"type": "function", ' + BAD[1:]),
        f"[{BAD}]",
    ],
}


def tokenizer_of(path, family: str, *, has_tokens: bool) -> Tokenizer:
    """That of the tiny checkpoint, where tokens that no text here needs are others: two that are no text, and the
    marks."""
    content = json.loads((path / "tokenizer.json").read_text())
    marks = MARKS[family] if has_tokens else ()
    names = {HIDDEN: True, SHOWN: False, **dict.fromkeys(marks, len(marks) == 1)}
    places = dict(zip(FREED, names, strict=False))
    content["model"]["vocab"] = {text: one for text, one in content["model"]["vocab"].items() if one not in places}
    shared = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    content["added_tokens"] += [
        {"id": one, "content": text, "special": names[text], **shared} for one, text in places.items()
    ]
    return Tokenizer.from_str(json.dumps(content))


def form_of(family: str, tokenizer: Tokenizer) -> CallForm:
    form = native_form(SHOWN_BY[family], None, AddedTokens(tokenizer, [END]))
    assert form is not None
    return form


def matcher_of(tokenizer: Tokenizer, grammar: Grammar | None) -> LLMatcher:
    assert grammar is not None
    return GrammarCompiler(tokenizer.to_str, [END]).matcher(grammar)


def read(reader: CallReader, text: str) -> list[tuple[str | None, str]]:
    parts = reader.feed(text) + reader.end()
    return [(part.name, part.arguments) for part in parts if isinstance(part, CallPart)]


def check(calls: Sequence[tuple[str | None, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "spelled"])
@pytest.mark.parametrize("family", MARKS)
def test_text_is_free_and_calls_are_not(chat_checkpoint, family, has_tokens):
    """What is allowed is whole; what is read of it as a call follows its schema."""
    tokenizer = tokenizer_of(chat_checkpoint, family, has_tokens=has_tokens)
    form = form_of(family, tokenizer)
    begun = matcher_of(tokenizer, form.grammar(TOOLS, is_parallel=True))
    for text in ALLOWED[family] + REFUSED[family]:
        tokens = tokenizer.encode(text.replace("KEY", KEYS[family]), add_special_tokens=False).ids
        matcher = begun.deep_copy()
        is_whole = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert is_whole == (text in ALLOWED[family]), text
        if is_whole:
            calls = read(form.reader(TOOLS, None, is_followed=True), tokenizer.decode(tokens))
            is_text = text.startswith(("a {", "text", "a" + HIDDEN, '{"name": "sun"', '{"arg'))
            assert len(calls) == (0 if is_text else text.count('"KEY"') + text.count("</function>"))
            check(calls)


@pytest.mark.parametrize("family", MARKS)
def test_a_call_follows_its_mark_and_only_one_where_calls_are_not_parallel(chat_checkpoint, family):
    tokenizer = tokenizer_of(chat_checkpoint, family, has_tokens=True)
    begun = matcher_of(tokenizer, form_of(family, tokenizer).grammar(TOOLS, is_parallel=False))
    assert begun.deep_copy().try_consume_tokens(tokenizer.encode(MARKS[family][0] + "a").ids) == 1
    one = GOOD.replace("KEY", KEYS[family])
    texts = {"hermes": f"<tool_call>{one}</tool_call>", "mistral": f"[TOOL_CALLS][{one}", "llama": f"[{one}"}
    texts["xml"] = f"a\n{XML}</tool_call>"
    for more, is_allowed in (("", True), ("a", False), (", " + one, False), ("<tool_call>", False)):
        tokens = tokenizer.encode(texts[family] + more).ids
        assert (begun.deep_copy().try_consume_tokens(tokens) == len(tokens)) == is_allowed, more


@pytest.mark.parametrize(
    ("family", "has_tokens", "beginning", "is_parallel"),
    list(in_turn(FORMS, [Beginning.after, Beginning.before, Beginning.inside], [True, False])),
)
def test_whatever_is_written_its_calls_follow_their_schemas(
    chat_checkpoint, family, has_tokens, beginning, is_parallel
):
    """Texts of parts that models write and that hide marks, as far as the grammar lets them go on, and then of any
    tokens; each is read whole and cut at random."""
    choose = random.Random(f"{family} {has_tokens} {beginning} {is_parallel}")
    tokenizer = tokenizer_of(chat_checkpoint, family, has_tokens=has_tokens)
    form, vocabulary = form_of(family, tokenizer), tokenizer.get_vocab_size()
    grammar = ReasoningMarks(tokenizer, THINKING).grammar(form.grammar(TOOLS, is_parallel=is_parallel), beginning)
    begun = matcher_of(tokenizer, grammar)
    parts = ["a ", *'<{["}] ', "\n", ", ", "<think>", "</think>", HIDDEN, SHOWN, "<tool_", "call>", "[TOOL_", "CALLS]"]
    parts += [*MARKS[family]] * 4 + [one.replace("KEY", KEYS[family]) for one in (GOOD, GOOD, GOOD, BAD, BAD)]
    parts += ['{"name": ', '"weather"', '{"name": "now", "arguments": {}}', '"arguments": {"days": 99}}']
    if family == "xml":
        parts = [part for part in parts if "name" not in part]
        parts += ["<function=", "weather>", "now>\n", "<parameter=", "days>\n2", "\n</parameter>\n", "</function>\n"]
        parts += [XML, XML, BAD_XML, f"\n{XML}", f"\n{NO_DAYS}", f"\n{CITY}"]
    num_calls = 0
    for _ in range(NUM_TEXTS):
        matcher, tokens = begun.deep_copy(), list[int]()
        for part in choose.choices(parts, k=12):
            wanted = tokenizer.encode(part, add_special_tokens=False).ids
            if choose.random() < 0.3:  # spelled by tokens that are no marks
                wanted = [one for character in part for one in tokenizer.encode(character).ids]
            num = matcher.try_consume_tokens(wanted)
            tokens += wanted[:num]
        while not matcher.is_accepting() and len(tokens) < 400:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:vocabulary]
            likely = [one for one in np.flatnonzero(bits).tolist() if one != END]
            forced = matcher.compute_ff_tokens()
            tokens.append(forced[0] if forced else choose.choice(likely))
            assert matcher.consume_token(tokens[-1])
        text = tokenizer.decode(tokens)
        cuts = sorted(choose.sample(range(1, len(text)), min(5, len(text) - 1))) if text else []
        reader = PartReader(ReasoningReader(beginning), form.reader(TOOLS, None, is_followed=True))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found = [part for i, piece in enumerate(pieces) for part in reader.feed(piece, is_last=i == len(cuts))[1]]
        calls = [(one.name, one.arguments) for one in found if isinstance(one, CallPart)]
        check(calls)
        assert is_parallel or len(calls) < 2
        num_calls += len(calls)
    assert num_calls > NUM_TEXTS / 30
