"""Tools: what a request may say of functions, and the grammar of calls that are forced.

`required` and a named function are prescribed as vLLM does it: the text is a JSON list of calls, or the arguments
alone, whatever the model's own form is. `auto` leaves the model its form (`call_forms.py`). It must not know how calls
are read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from actors.protocol.grammar import Grammar
from cluster.serving.fields import BodyPart, at_most
from cluster.serving.grammars import json_grammar

MOST_TOOLS = 1024
Names = Collection[str] | None
"""Those of the functions that may be called; None for all."""
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_OTHER_KINDS = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keys by which a schema says without `type` what it describes."""


class FunctionDefinition(BodyPart):
    """A function that the model may call. Its schema is always followed where a call is forced; with `strict` under
    `auto`, too, or the request is refused."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def is_strict(self) -> bool:
        """Whether its schema has to be followed wherever it is called."""
        return self.strict is True

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """Arguments are an object; a function that names no parameters has none, as OpenAI says."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        kind = self.parameters.get("type")
        is_open = kind is None and not any(key in self.parameters for key in _OTHER_KINDS)
        if is_open or (isinstance(kind, list) and "object" in kind):
            return self.parameters | {"type": "object"}
        return self.parameters


class ToolDefinition(BodyPart):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition

    @property
    def with_any_arguments(self) -> ToolDefinition:
        """The same for any object."""
        return self.model_copy(update={"function": self.function.model_copy(update={"parameters": ANY_ARGUMENTS})})

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
        return json_grammar(named_tools(tools, [choice.function.name])[0].function.schema_of_arguments)
    if choice != "required":
        return None
    if not tools:
        raise ValueError("tool_choice: required needs tools")
    calls, definitions = call_schemas(tools, "parameters")
    most = {} if is_parallel else {"maxItems": 1}
    return json_grammar({"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": definitions})


def call_schemas(tools: Sequence[ToolDefinition], key: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Schemas of the calls of each tool, with its arguments under `key`, and the definitions that these refer to, which
    belong to the root of the whole schema."""
    calls, definitions = [], {}
    for place, tool in enumerate(tools):
        definitions[str(place)] = moved(tool.function.schema_of_arguments, f"#/$defs/{place}")
        fields = {"name": {"const": tool.function.name}, key: {"$ref": f"#/$defs/{place}"}}
        calls.append({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    return calls, definitions


def moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself are right at another `place`."""
    if isinstance(schema, list):
        return [moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {name: moved(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    return copy | {"$ref": place + reference[1:]} if isinstance(reference, str) and reference[:1] == "#" else copy
