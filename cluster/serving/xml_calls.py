"""Calls that models write in a form like XML (Qwen3-Coder, Qwen3.5 and later): how they are read, and their grammar.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

Models of this form often leave out the first mark, so that a call also begins with the name of a known function. It
must not know how a parameter's text is typed, or how replies are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from actors.protocol.grammar import Grammar
from cluster.serving.added_tokens import AddedTokens
from cluster.serving.call_readers import CallReader, Part
from cluster.serving.grammars import either, quoted, regular
from cluster.serving.marks import without_beginning_of
from cluster.serving.tools import Names, ToolDefinition
from cluster.serving.xml_parameters import END, RawParameters, UnwritableError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_MARK = re.compile(f"{OPEN}|{FUNCTION}")
_WRITTEN_END = re.compile(re.escape(END))
_LIKELY_END = re.compile(rf"\n?</parameter>(?=\s*(?:{_PARAMETER}|{_FUNCTION_END}))")
"""What ends a text that no grammar wrote, which may have the mark, too."""


class XmlForm:
    """The calls of a checkpoint that writes them so."""

    def __init__(self, tokens: AddedTokens) -> None:
        self._tokens = tokens

    def reader(self, tools: Sequence[ToolDefinition], names: Names, *, is_followed: bool) -> XmlCallReader:
        functions = [tool.function for tool in tools if names is None or tool.function.name in names]
        return XmlCallReader({one.name: one.schema_of_arguments for one in functions}, is_followed=is_followed)

    def grammar(self, tools: Sequence[ToolDefinition], *, is_parallel: bool) -> Grammar:
        """Text is free up to the first mark, or the mark with the name of a function. Raises ValueError, one line, if a
        strict function cannot be held."""
        begin, end, around = self._tokens.rules_around_calls(OPEN, CLOSE, is_parallel=is_parallel)
        names = [tool.function.name for tool in tools]
        calls = [f"(opened {quoted(name + '>')} | bare{place}) call{place}" for place, name in enumerate(names)]
        rules = [*around, f"call: {either(*calls)} {end}", f"opened: {begin} {quoted(chr(10) + FUNCTION)}"]
        for place, tool in enumerate(tools):
            rules += [
                f"bare{place}[lazy]: /(.|\\n)*{regular(f'{FUNCTION}{names[place]}>')}/",
                f"call{place}: {quoted(chr(10))} parameters{place} {quoted(_FUNCTION_END + chr(10))}",
                *_parameters(tool).rules(f"parameters{place}"),
            ]
        return Grammar("lark", "\n".join(rules))


def _parameters(tool: ToolDefinition) -> RawParameters:
    function = tool.function
    try:
        return RawParameters(function.schema_of_arguments, is_strict=function.is_strict)
    except UnwritableError as error:
        raise UnwritableError(f"{function.name}: {error}") from None


class XmlCallReader(CallReader):
    """Reads a reply with calls of `functions`, given their schemas; each is sent once it is complete. What is no call
    of these functions is text as it is. `is_followed`: a grammar wrote the calls."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], *, is_followed: bool) -> None:
        super().__init__()
        self._functions = functions
        self._value_end = _WRITTEN_END if is_followed else _LIKELY_END
        self._held = ""
        self._is_behind_call = False

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while (more := self._next()) is not None:
            parts += more
        return parts

    def _rest(self) -> list[Part]:
        return self._before(self._held)

    def _next(self) -> list[Part] | None:
        """What comes next; None while more text decides."""
        if self._is_behind_call:
            behind = self._held.lstrip()
            if behind != CLOSE and CLOSE.startswith(behind):
                return None
            self._is_behind_call = False
            if behind.startswith(CLOSE):
                self._held = behind[len(CLOSE) :]
        found = _MARK.search(self._held)
        if found is None:
            before = min([without_beginning_of(mark, self._held) for mark in (OPEN, FUNCTION)], key=len)
            return self._before(before) if before else None
        if found.start():
            return self._before(self._held[: found.start()])
        try:
            call = self._read_call()
        except _NoCallError:
            return self._before(found[0])
        if call is None:
            return None
        name, arguments, self._held = call
        self._is_behind_call = True
        return [self._call(name, arguments)]

    def _before(self, text: str) -> list[Part]:
        """The text that the rest begins with."""
        self._held = self._held[len(text) :]
        return self._shown(text)

    def _read_call(self) -> tuple[str, str, str] | None:
        """Name and arguments of the call that the rest begins with, and what follows it; None while it is not complete.
        Raises _NoCallError if it is none."""
        begun = self._held.removeprefix(OPEN).lstrip() if self._held.startswith(OPEN) else self._held
        if FUNCTION.startswith(begun):
            return None
        name, end, rest = begun.removeprefix(FUNCTION).partition(">")
        is_known = name in self._functions if end else any(one.startswith(name) for one in self._functions)
        if not begun.startswith(FUNCTION) or not is_known:
            raise _NoCallError
        if not end or _FUNCTION_END not in rest:
            return None
        parameters, values = RawParameters(self._functions[name]), dict[str, str]()
        while not (rest := rest.lstrip()).startswith(_FUNCTION_END):
            if _FUNCTION_END.startswith(rest) or _PARAMETER.startswith(rest):
                return None
            if not rest.startswith(_PARAMETER):
                raise _NoCallError
            key, end, text = rest.removeprefix(_PARAMETER).partition(">")
            if "\n" in key:
                raise _NoCallError
            text = text.removeprefix("\n")
            last = self._value_end.search(text)
            if not end or last is None:
                return None
            try:
                values[key] = parameters.read(key, text[: last.start()])
            except RecursionError:
                raise _NoCallError from None
            rest = text[last.end() :]
        members = ", ".join([f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items()])
        return name, f"{{{members}}}", rest.removeprefix(_FUNCTION_END)


class _NoCallError(ValueError):
    """Text that only begins like a call."""
