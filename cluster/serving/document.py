"""The description of the API that `/openapi.json` gives: of each route the body, the replies, and who may ask.

Bodies are pydantic's records and described by it; replies are msgspec's, and described by msgspec. It must not know
what the routes do.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from fastapi import FastAPI
from msgspec import Struct
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.serving.errors import ERROR_SCHEMA

_PLACE = "#/components/schemas/"
_ERROR = "ApiError"
_ENDS = "[DONE]"
_JSON = "application/json"

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": "An error in OpenAI's form", "content": {_JSON: {"schema": {"$ref": _PLACE + _ERROR}}}}
    for status in ("4XX", "5XX")
}
"""What any route may answer instead, for FastAPI."""


class ApiDocument:
    """Collects what is said of routes while they are added to an application."""

    def __init__(self) -> None:
        self._bodies: list[type[BaseModel]] = []
        self._replies: list[type[Struct]] = []

    def route(
        self, reply: type[Struct], body: type[BaseModel] | None = None, chunk: type[Struct] | None = None
    ) -> dict[str, Any]:
        """What FastAPI is given to describe a route: the record that it answers with, that of its body, and that of
        the events of a stream, if it has those."""
        self._replies += [reply] if chunk is None else [reply, chunk]
        content = {_JSON: {"schema": _named(reply)}}
        if chunk is not None:
            content["text/event-stream"] = {"schema": _event(chunk)}
        facts: dict[str, Any] = {"responses": {200: {"content": content}}}
        if body is not None:
            self._bodies.append(body)
            facts["openapi_extra"] = {"requestBody": {"content": {_JSON: {"schema": _named(body)}}, "required": True}}
        return facts

    def complete(self, app: FastAPI, *, asks_for_key: bool, open_paths: Collection[str]) -> None:
        """Add to the document of `app` the records that its routes name, and whether they ask for a key, but for those
        of `open_paths`."""
        document = app.openapi()
        schemas = {**_body_schemas(self._bodies), **_reply_schemas(self._replies), _ERROR: ERROR_SCHEMA}
        document["components"] = {"schemas": schemas}
        if asks_for_key:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            for path in open_paths:
                document["paths"][path]["get"]["security"] = []


def _named(form: type) -> dict[str, Any]:
    return {"$ref": _PLACE + form.__name__}


def _event(chunk: type[Struct]) -> dict[str, Any]:
    """One event of a stream: tools for OpenAPI take the schema of an event stream for that of each event."""
    record = {"contentMediaType": _JSON, "contentSchema": {"anyOf": [_named(chunk), {"$ref": _PLACE + _ERROR}]}}
    line = f"A {chunk.__name__}, or an error; {_ENDS} in the end"
    text = {"type": "string", "description": line, "anyOf": [{"const": _ENDS}, record]}
    return {"type": "object", "properties": {"data": text}, "required": ["data"]}


def _body_schemas(forms: Collection[type[BaseModel]]) -> dict[str, Any]:
    """The schemas of these records, and of those in them, by name."""
    _, schemas = models_json_schema([(form, "validation") for form in forms], ref_template=_PLACE + "{model}")
    return schemas["$defs"]


def _reply_schemas(forms: Collection[type[Struct]]) -> dict[str, Any]:
    """The same of records that are sent. What has a default is always sent, so that it is no option of the schema."""
    _, schemas = msgspec.json.schema_components(forms, ref_template=_PLACE + "{name}")
    for schema in schemas.values():
        fields, required = schema["properties"], schema.get("required", ())
        schema["required"] = [name for name, field in fields.items() if name in required or "default" in field]
        for field in fields.values():
            field.pop("default", None)
        if "description" in schema:  # a docstring, with its indentation
            schema["description"] = " ".join(schema["description"].split())
    return schemas
