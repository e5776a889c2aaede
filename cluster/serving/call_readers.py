"""Calls found in the text of a reply as it grows, in the forms that forced calls and models of several families have.

Each reader is fed with text that is cut anywhere, and the parts of all cuts join to the same whole. Calls that a
grammar wrote are sent as they are written; of others a checkpoint's `response_template` tells how they are read, by
transformers' `ResponseParser`. It must not know grammars or how replies are written.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.serving.marks import without_beginning_of

_CALLS = "tool_calls"
_UNREADABLE = (ValueError, KeyError, RecursionError)
"""What a `ResponseParser` raises for a text of another form; the last one for JSON that is nested without end."""
_DECODER = json.JSONDecoder(parse_int=len, parse_float=len)
"""Finds the end of a value. What a number is does not matter, and some are too large to be one."""
_CALL = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([\w-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
"""How a grammar has a call begin, up to its arguments."""
_END = re.compile(r"\s*\}")


@dataclass(frozen=True, slots=True)
class CallPart:
    """What a call gained; its first part has `id` and `name`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Part = str | CallPart
"""Text for the reader, or a part of a call."""


class CallReader(ABC):
    """Reads the text of one reply, cut anywhere; the parts of all cuts join to the same whole. White space around calls
    is no text."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._space = ""  # at the end of the text so far: it comes once more text follows

    @abstractmethod
    def feed(self, text: str) -> list[Part]: ...

    def end(self) -> list[Part]:
        """No text follows."""
        parts = self._rest()
        return parts if self._num_calls or not self._space else [*parts, self._space]

    def _rest(self) -> list[Part]:
        """What was held until the end."""
        return []

    def _shown(self, text: str) -> list[Part]:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [shown] if shown else []

    def _call(self, name: str, arguments: str) -> CallPart:
        """The next call."""
        self._space = ""
        self._num_calls += 1
        return CallPart(self._num_calls - 1, arguments, f"call_{secrets.token_hex(12)}", name)


class ArgumentsReader(CallReader):
    """All text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        return [CallPart(0, text) if self._num_calls else self._call(self._name, text)]


class CallListReader(CallReader):
    """The text is a JSON list of calls; each is sent once it is complete."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def feed(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while "}" in text and (found := _written_call(rest := self._text.lstrip(" \t\r\n[,"))) is not None:
            call, end = found
            self._text = rest[end:]
            parts.append(self._call(*call))
        return parts


class MarkedCallReader(CallReader):
    """A text whose calls a grammar wrote, each between the marks `opens` and `closes`, which may stand in its
    arguments, too. A call that was cut is text, without its mark."""

    def __init__(self, opens: str, closes: str) -> None:
        super().__init__()
        self._opens, self._closes = opens, closes
        self._held = ""
        self._is_open = False

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while True:
            if not self._is_open:
                before, mark, behind = self._held.partition(self._opens)
                if not mark:
                    before = without_beginning_of(self._opens, before)
                    self._held = self._held[len(before) :]
                    return parts + self._shown(before)
                parts += self._shown(before)
                self._held, self._is_open = behind, True
            if self._closes not in self._held or (found := _written_call(self._held)) is None:
                return parts
            call, end = found
            behind = self._held[end:].lstrip()
            if not behind.startswith(self._closes):
                return parts
            parts.append(self._call(*call))
            self._held, self._is_open = behind[len(self._closes) :], False

    def _rest(self) -> list[Part]:
        return self._shown(self._held)


class JsonReplyReader(CallReader):
    """Llama 3 and Mistral: a reply that begins with JSON, behind an optional mark, is a call or a list of calls as a
    whole. It is sent in the end, as text if it is no call, or one of a function that is not among `names`. With
    `begins` a grammar wrote the calls of a text that begins so, and no other text has any."""

    def __init__(self, mark: str, names: Collection[str] | None = None, begins: re.Pattern[str] | None = None) -> None:
        super().__init__()
        self._mark = mark
        self._names = names
        self._begins = begins
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> list[Part]:
        self._held += text
        begun = self._held.lstrip()
        may_be_calls = self._mark.startswith(begun) or begun.startswith((self._mark, "{", "["))
        if may_be_calls and not self._is_text:
            return []
        self._is_text, held, self._held = True, self._held, ""
        return [held] if held else []

    def _rest(self) -> list[Part]:
        text: list[Part] = [self._held] if self._held else []
        if self._begins is not None:
            begun = self._begins.match(self._held)
            written = _written_calls(self._held.strip().removeprefix(self._mark).lstrip()) if begun else []
            return [self._call(*call) for call in written] or text
        try:
            found = json.loads(self._held.strip().removeprefix(self._mark))
        except (ValueError, RecursionError):
            found = []
        return [self._call(*call) for call in _calls_of(found, self._names)] or text


class TemplateReader(CallReader):
    """A text in the form that a `response_template` of transformers describes. What is no call after all is text, as
    one of a function that is not among `names`."""

    def __init__(
        self,
        template: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        names: Collection[str] | None = None,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._names = names
        self._make = lambda: ResponseParser(dict(template), prefix="", tools=[dict(tool) for tool in tools])
        self._begin()

    def _begin(self) -> None:
        super().__init__()
        self._parser = self._make()
        self._text = ""
        self._num_shown = 0  # characters
        self._region = ""
        self._is_broken = False

    def feed(self, text: str) -> list[Part]:
        self._text += text
        if self._is_broken:
            return self._shown(text)
        try:
            return self._parts(self._parser.feed(text))
        except _UNREADABLE:  # a region that the template cannot read
            return self._broken()

    def _broken(self) -> list[Part]:
        """What was not sent yet, where all from that region on is text. The place where it broke does not depend on
        the cuts: what is read is the longest beginning that can be."""
        text, num_shown, num_calls = self._text, self._num_shown, self._num_calls
        readable, unreadable = 0, len(text)
        while unreadable - readable > 1:
            middle = (readable + unreadable) // 2
            try:
                self._make().feed(text[:middle])
                readable = middle
            except _UNREADABLE:
                unreadable = middle
        self._begin()
        parts = self._parts(self._parser.feed(text[:readable]))
        parts += self._shown(self._region + text[readable:])
        self._text, self._is_broken = text, True
        content = "".join([part for part in parts if isinstance(part, str)])[num_shown:]
        calls = [part for part in parts if isinstance(part, CallPart) and part.index >= num_calls]
        return [*([content] if content else []), *calls]

    def _rest(self) -> list[Part]:
        if self._is_broken:
            return []
        try:
            return self._parts(self._parser.finalize()[1])
        except _UNREADABLE:
            return self._shown(self._region)

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            if event["field"] != _CALLS:
                parts += self._shown(event["text"]) if event["type"] == "region_chunk" else []
            elif event["type"] == "region_close":
                calls = [self._call(*call) for call in _calls_of(event["value"], self._names)]
                parts += calls or self._shown(self._region)
                self._region = ""
            else:
                self._region += event.get("text", "")
        return parts

    def _shown(self, text: str) -> list[Part]:
        parts = super()._shown(text)
        self._num_shown += sum([len(part) for part in parts if isinstance(part, str)])
        return parts


def _calls_of(value: Any, names: Collection[str] | None) -> list[tuple[str, str]]:
    """Names and arguments of a call, or a list of them, in the forms that models write; none if one of them is none, or
    not of `names`."""
    calls = [_call_of(one, names) for one in (value if isinstance(value, list) else [value])]
    return [] if None in calls else [call for call in calls if call is not None]


def _call_of(value: Any, names: Collection[str] | None) -> tuple[str, str] | None:
    """Name and arguments of a call; None if it is none, or not of `names`."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if names is not None and value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return (value["name"], arguments) if isinstance(arguments, str) else None


def _written_call(text: str) -> tuple[tuple[str, str], int] | None:
    """Name and arguments, as they are written, of the call that a text begins with, and where it ends; None if it is
    not complete."""
    if (begin := _CALL.match(text)) is None:
        return None
    try:
        _, end = _DECODER.raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        return None
    last = _END.match(text, end)
    return None if last is None else ((begin[1], text[begin.end() : end]), last.end())


def _written_calls(text: str) -> list[tuple[str, str]]:
    """The calls of a text that is one, or a list of them; none if it is cut."""
    is_list = text.startswith("[")
    calls, rest = list[tuple[str, str]](), text[is_list:]
    while (found := _written_call(rest)) is not None:
        calls.append(found[0])
        rest = rest[found[1] :].lstrip()
        if not is_list or not rest.startswith(","):
            break
        rest = rest[1:]
    return calls if rest == ("]" if is_list else "") else []
