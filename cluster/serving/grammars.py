"""The fields of a request that prescribe the form of its text: OpenAI's `response_format`, vLLM's `structured_outputs`.

Each becomes the one grammar that the engine is given. It must not know whether a text is a grammar: what compiles it
says so.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from actors.protocol.grammar import Grammar
from cluster.serving.fields import BodyPart

ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
"""What `json_object` asks for."""


class JsonSchemaFormat(BodyPart):
    """`json_schema` of a response format. A schema is always followed, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BodyPart):
    """`response_format`, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is for the type json_schema, which needs it")
        return self

    def grammar(self) -> Grammar | None:
        """What the text has to follow, if anything."""
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        return ANY_OBJECT if schema is None else json_grammar(schema)


class StructuredOutputs(BodyPart):
    """`structured_outputs`, as vLLM has it: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar_: str | None = Field(None, alias="grammar")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(value is not None for value in vars(self).values()) != 1:
            raise ValueError("give one of json, json_object, regex, choice and grammar")
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise ValueError("choice: give at least one text, none of them empty")
        return self

    def grammar(self) -> Grammar:
        """What the text has to follow."""
        if self.json_ is not None:
            return json_grammar(self.json_)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return Grammar("lark", "start: CHOICE\nCHOICE: " + " | ".join(map(quoted, self.choice)))
        return ANY_OBJECT if self.grammar_ is None else Grammar("lark", self.grammar_)


def json_grammar(schema: dict[str, Any] | str) -> Grammar:
    """The texts that a schema describes; keys stay in its order. Raises ValueError, one line, for one that is nested
    without end."""
    if isinstance(schema, str):
        return Grammar("json_schema", schema)
    try:
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def quoted(text: str) -> str:
    """A text as Lark has it."""
    return json.dumps(text, ensure_ascii=False)


def regular(text: str) -> str:
    """A text in a regular expression of Lark."""
    return re.escape(text).replace("/", "\\/")


def either(*rules: str | None) -> str:
    """One of these rules of Lark, without those that are None."""
    return f"({' | '.join([rule for rule in rules if rule])})"
