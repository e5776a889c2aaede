"""The forms in which models write calls when they decide themselves: how each is read, and its grammar.

A checkpoint tells its form by a `response_template` of its tokenizer or by its chat template, for the families of a
short table. Where a call has a mark or a beginning by which it is known, the grammar leaves the text before it free and
prescribes the call from there on, so that every call that is read follows its tool's schema. It must not know how
replies are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from actors.grammars.compiler import WHITESPACE
from actors.protocol.grammar import Grammar
from cluster.serving.added_tokens import AddedTokens
from cluster.serving.call_readers import CallReader, JsonReplyReader, MarkedCallReader, TemplateReader
from cluster.serving.grammars import either, json_grammar, quoted, regular
from cluster.serving.tools import Names, ToolDefinition, call_schemas
from cluster.serving.xml_calls import FUNCTION, OPEN, XmlForm

HERMES: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"content": "text", "content_args": {"strip": False}},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "content_args": {"allow_non_json": True},
            "repeats": True,
        },
    },
}
"""Hermes and Qwen: each call between these marks, anywhere in the text."""
_PLAIN_KEYS = {"open", "close", "content", "content_args", "repeats", "optional", "transform"}
_SPACE = r"[ \t\r\n]{0,20}"
_BRACKET = r"\["
_NAMED = f'''{_SPACE}[{{]{_SPACE}("type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?"name"{_SPACE}:{_SPACE}"'''
"""A regular expression of a call up to its name."""


class CallForm(Protocol):
    """One checkpoint's form."""

    def reader(self, tools: Sequence[ToolDefinition], names: Names, *, is_followed: bool) -> CallReader:
        """Reads a reply that follows the grammar, or one that is free."""
        ...

    def grammar(self, tools: Sequence[ToolDefinition], *, is_parallel: bool) -> Grammar | None:
        """What replies follow that may call these tools; None if the form has no grammar."""
        ...


@dataclass(frozen=True, slots=True)
class MarkedForm:
    """Calls anywhere in the text, as a `response_template` describes them. With `marks` they are JSON between these two
    texts, and a grammar can write them."""

    template: Mapping[str, Any]
    marks: tuple[str, str] | None
    tokens: AddedTokens

    def reader(self, tools: Sequence[ToolDefinition], names: Names, *, is_followed: bool) -> CallReader:
        if is_followed and self.marks is not None:
            return MarkedCallReader(*self.marks)
        return TemplateReader(self.template, [tool.for_template() for tool in tools], names)

    def grammar(self, tools: Sequence[ToolDefinition], *, is_parallel: bool) -> Grammar | None:
        if self.marks is None:
            return None
        begin, end, around = self.tokens.rules_around_calls(*self.marks, is_parallel=is_parallel)
        calls, definitions = call_schemas(tools, "arguments")
        rules = [*around, f"call: {begin} GAP @answer GAP {end}", f"GAP: /{_SPACE}/"]
        return replace(json_grammar({"anyOf": calls, "$defs": definitions}), frame="\n".join(rules))


@dataclass(frozen=True, slots=True)
class JsonReplyForm:
    """A reply that begins as a call, or as a list of calls, behind an optional mark, is that as a whole. `key` is the
    name of a call's arguments."""

    mark: str
    key: str
    tokens: AddedTokens

    def reader(self, tools: Sequence[ToolDefinition], names: Names, *, is_followed: bool) -> CallReader:
        known = "|".join([tool.function.name for tool in tools] if names is None else names)
        begins = re.compile(f'{self._begin(f"({_BRACKET})?")}({known})"') if is_followed else None
        return JsonReplyReader(self.mark, names, begins)

    def _begin(self, bracket: str) -> str:
        """A regular expression of a reply up to its first call's name."""
        return f"{_SPACE}({regular(self.mark)})?{_SPACE}{bracket}{_NAMED}"

    def grammar(self, tools: Sequence[ToolDefinition], *, is_parallel: bool) -> Grammar | None:
        """A text that begins otherwise is free. One that begins with a bracket has no tokens that are not shown: they
        could hide the beginning of a call."""
        mark, all_added, others = self.tokens.one(self.mark), self.tokens.any(), self.tokens.any(but=self.mark)
        free = f"OTHER ({all_added} FREE)*" if all_added else "OTHER"
        started = either(mark and f"{mark} called", "called", "(one | first) FREE", "BRACED", free)
        rules = [
            f"start: {f'{others}* ' if others else ''}{started}",
            f"""called: (one call | first call{' (GAP "," NEXT call)*' if is_parallel else ""} GAP "]") GAP""",
            f"call: {either(*[f'name{place} between arguments{place} GAP CLOSES' for place in range(len(tools))])}",
            f"one[lazy]: /{self._begin('')}/",
            f"first[lazy]: /{self._begin(_BRACKET)}/",
            f"NEXT: /{_NAMED}/",
            f'between: GAP "," GAP {quoted(quoted(self.key))} GAP ":" GAP',
            'CLOSES: "}"',
            f"GAP: /{_SPACE}/",
            "FREE: /(.|\\n)*/",
            r"BRACED: /[ \t\r\n]*[\[{](.|\n)*/",
            r"OTHER: /[ \t\r\n]*([^ \t\r\n\[{](.|\n)*)?/",
        ]
        for place, tool in enumerate(tools):
            schema = tool.function.schema_of_arguments | {"x-guidance": {"whitespace_pattern": WHITESPACE}}
            rules += [
                f'name{place}[lazy]: /{tool.function.name}"/',
                f"arguments{place}: %json {json.dumps(schema)}",
            ]
        return Grammar("lark", "\n".join(rules))


def native_form(
    chat_template: str, response_template: Mapping[str, Any] | None, tokens: AddedTokens
) -> CallForm | None:
    """That of a checkpoint, as its tokenizer says it or its chat template shows; None if none is known."""
    if response_template is None and OPEN in chat_template:
        return XmlForm(tokens) if FUNCTION in chat_template else MarkedForm(HERMES, _marks(HERMES), tokens)
    if response_template is not None:
        return MarkedForm(response_template, _marks(response_template), tokens)
    for mark, key in (("[TOOL_CALLS]", "arguments"), ("<|python_tag|>", "parameters")):
        if mark in chat_template:
            return JsonReplyForm(mark, key, tokens)
    return None


def _marks(template: Mapping[str, Any]) -> tuple[str, str] | None:
    """The texts around calls, if these are plain JSON and the rest is content; None for any other form."""
    fields = template.get("fields", {})
    calls = fields.get("tool_calls", {})
    is_plain = {*fields} == {"content", "tool_calls"} and {*calls} <= _PLAIN_KEYS and calls.get("content") == "json"
    is_plain &= {*calls.get("content_args", {})} <= {"allow_non_json"} and calls.get("repeats") is True
    is_plain &= calls.get("transform", "{content}") == "{content}" and not {*fields["content"]} & {"open", "close"}
    opens, closes = calls.get("open"), calls.get("close")
    return (opens, closes) if is_plain and isinstance(opens, str) and isinstance(closes, str) else None
