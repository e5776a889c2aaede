"""Tools: what a request may say of functions, the grammar of forced calls, and calls found in a text as it grows.

`required` and a named function are prescribed as vLLM does it: the text is a JSON list of calls, or the arguments
alone, whatever the model's own form is. `auto` leaves the model its form, which the checkpoint tells: by a
`response_template` of its tokenizer, read by transformers' `ResponseParser`, or by its chat template, for the families
of a short table. It must not know how replies are written.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import Discriminator, Field, Tag

from actors.protocol.grammar import Grammar
from cluster.serving.fields import BodyPart, at_most
from cluster.serving.grammars import json_grammar

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
MOST_TOOLS = 1024
_CALLS = "tool_calls"
_UNREADABLE = (ValueError, KeyError, RecursionError)
"""What a `ResponseParser` raises for a text of another form; the last one for JSON that is nested without end."""


class FunctionDefinition(BodyPart):
    """A function that the model may call. Its schema is always followed where a call is forced."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(BodyPart):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class NamedFunction(BodyPart):
    """The name of one of the tools."""

    name: str


class NamedTool(BodyPart):
    """A `tool_choice` that asks for one function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BodyPart):
    """Some of the tools, and whether one of them may or must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True), at_most(MOST_TOOLS)]


class AllowedToolsChoice(BodyPart):
    """A `tool_choice` that asks for some of the functions. The prompt has all of them, so that its beginning stays
    known while the choice changes."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(BodyPart):
    """What an earlier message called; `arguments` is JSON, or nothing where the function has none."""

    name: str
    arguments: str
    parsed_arguments: Any = None
    """What OpenAI's client made of them, which it sends back with a message that it was given."""


class ToolCall(BodyPart):
    """A call of an earlier message. Its place is `index`, which a client that joined the chunks of a stream has."""

    index: int | None = None
    id: str
    type: Literal["function"]
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it: arguments as an object. Raises ValueError, one line, if they are none."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            raise ValueError(f"messages: the arguments of the call {self.id:.40} are not JSON") from None
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


def _kind_of_choice(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "AllowedToolsChoice" if kind == "allowed_tools" else "NamedTool"


CallMode = Literal["auto", "none", "required"] | NamedTool
ToolChoice = (
    Literal["auto", "none", "required"]
    | Annotated[
        Annotated[NamedTool, Tag("NamedTool")] | Annotated[AllowedToolsChoice, Tag("AllowedToolsChoice")],
        Discriminator(_kind_of_choice),
    ]
)


def named_tools(tools: Sequence[ToolDefinition], names: Collection[str]) -> list[ToolDefinition]:
    """Those of these names, in the order of `tools`. Raises ValueError, one line, if there is none of one name."""
    known = {tool.function.name for tool in tools}
    for name in names:
        if name not in known:
            raise ValueError(f"tool_choice: there is no tool {name!r:.80}")
    return [tool for tool in tools if tool.function.name in names]


def call_grammar(tools: Sequence[ToolDefinition], choice: CallMode, *, is_parallel: bool) -> Grammar | None:
    """What the text has to follow if a call of one of the tools is forced; None if none is. Raises ValueError, one
    line, if there is no such tool."""
    if isinstance(choice, NamedTool):
        return json_grammar(_parameters(named_tools(tools, [choice.function.name])[0].function))
    if choice != "required":
        return None
    if not tools:
        raise ValueError("tool_choice: required needs tools")
    calls = [_call_schema(tool.function, f"#/items/anyOf/{i}/properties/parameters") for i, tool in enumerate(tools)]
    return json_grammar(
        {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({} if is_parallel else {"maxItems": 1})}
    )


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    """A function that names no parameters has none, as OpenAI says."""
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    return none if function.parameters is None else function.parameters


def _call_schema(function: FunctionDefinition, place: str) -> dict[str, Any]:
    fields = {"name": {"const": function.name}, "parameters": _moved(_parameters(function), place)}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself are right at another `place`."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    return moved | {"$ref": place + reference[1:]} if isinstance(reference, str) and reference[:1] == "#" else moved


# --- calls in a text --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallPart:
    """What a call gained; its first part has `id` and `name`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    @staticmethod
    def begin(index: int, name: str, arguments: str) -> CallPart:
        return CallPart(index, arguments, f"call_{secrets.token_hex(12)}", name)


Part = str | CallPart
"""Text for the reader, or a part of a call."""


class CallReader(Protocol):
    """Reads the text of one reply, cut anywhere; the parts of all cuts join to the same whole."""

    def feed(self, text: str) -> list[Part]: ...

    def end(self) -> list[Part]:
        """No text follows."""
        ...


class ArgumentsReader:
    """All text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        name, self._name = self._name, None
        return [CallPart(0, text) if name is None else CallPart.begin(0, name, text)]

    def end(self) -> list[Part]:
        return []


class CallListReader:
    """The text is a JSON list of calls; each is sent once it is complete."""

    def __init__(self) -> None:
        self._text = ""
        self._num_calls = 0

    def feed(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while "}" in self._text:
            rest = self._text.lstrip(" \t\r\n[,")
            try:
                call, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                break
            self._text = rest[end:]
            parts.append(CallPart.begin(self._num_calls, call["name"], _as_json(call["parameters"])))
            self._num_calls += 1
        return parts

    def end(self) -> list[Part]:
        return []


class JsonReplyReader:
    """Llama 3 and Mistral: a reply that begins with JSON, behind an optional mark, is a call or a list of calls as a
    whole. It is sent in the end, as text if it is no call, or one of a function that is not among `names`."""

    def __init__(self, mark: str, names: Collection[str] | None = None) -> None:
        self._mark = mark
        self._names = names
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

    def end(self) -> list[Part]:
        try:
            found = json.loads(self._held.strip().removeprefix(self._mark))
        except (ValueError, RecursionError):
            found = []
        calls = [_call_of(one, self._names) for one in (found if isinstance(found, list) else [found])]
        if calls and None not in calls:
            return [CallPart.begin(i, *call) for i, call in enumerate(calls) if call is not None]
        return [self._held] if self._held else []


class TemplateReader:
    """A text in the form that a `response_template` of transformers describes. White space around calls is no text, and
    what is no call after all is, as one of a function that is not among `names`."""

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
        self._parser = self._make()
        self._text = ""
        self._num_shown = 0  # characters
        self._num_calls = 0
        self._region = ""
        self._space = ""
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

    def end(self) -> list[Part]:
        parts: list[Part] = []
        if not self._is_broken:
            try:
                parts = self._parts(self._parser.finalize()[1])
            except _UNREADABLE:
                parts = self._shown(self._region)
        return parts if self._num_calls or not self._space else [*parts, self._space]

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            if event["field"] != _CALLS:
                parts += self._shown(event["text"]) if event["type"] == "region_chunk" else []
            elif event["type"] == "region_close":
                parts += self._called(event["value"])
                self._region = ""
            else:
                self._region += event.get("text", "")
        return parts

    def _called(self, value: Any) -> list[Part]:
        calls = [_call_of(one, self._names) for one in (value if isinstance(value, list) else [value])]
        if not calls or None in calls:
            return self._shown(self._region)
        parts: list[Part] = []
        for call in calls:
            assert call is not None
            parts.append(CallPart.begin(self._num_calls, *call))
            self._num_calls += 1
        self._space = ""
        return parts

    def _shown(self, text: str) -> list[Part]:
        """Text without the white space at its end, which comes once more text follows."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._num_shown += len(shown)
        return [shown] if shown else []


def _call_of(value: Any, names: Collection[str] | None) -> tuple[str, str] | None:
    """Name and arguments of a call in one of the forms that models write; None if it is none, or not of `names`."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if names is not None and value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return (value["name"], _as_json(arguments)) if isinstance(arguments, dict | str) else None


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


MakeReader = Callable[[Sequence[Mapping[str, Any]], Collection[str] | None], CallReader]
"""Makes the reader of one reply, for the tools of its request and the names of those that may be called (None: any)."""


def native_reader(chat_template: str, response_template: Mapping[str, Any] | None) -> MakeReader | None:
    """How calls in a checkpoint's own form are read, as its tokenizer says it or its chat template shows; None if no
    form is known."""
    if response_template is None and "<tool_call>" in chat_template:
        response_template = HERMES
    if response_template is not None:
        template = response_template
        return lambda tools, names: TemplateReader(template, tools, names)
    for shown, mark in (("[TOOL_CALLS]", "[TOOL_CALLS]"), ("<|python_tag|>", "<|python_tag|>")):
        if shown in chat_template:
            return lambda _, names, mark=mark: JsonReplyReader(mark, names)
    return None
