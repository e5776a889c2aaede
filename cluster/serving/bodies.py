"""Bodies of requests become records: their JSON is read and its fields are checked without holding up other requests.

A large body is read in a thread, one at a time, since it takes time that the streams of others would wait for; the
number of its values is bounded before any of them exists, because a byte of JSON can cost a hundred of memory. It must
not know fields.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from cluster.serving.errors import ApiError, Disconnected, invalid_fields

B = TypeVar("B", bound=BaseModel)

_SMALL = 1 << 15
"""Bytes that are read at once: in less time than a thread takes to begin."""
LEAST_VALUES = 1 << 18
"""Values that a body may have whatever the model is. They are read in 0.1 s."""
_ARRIVE_S = 60.0
"""Seconds in which a body has to arrive."""
_HEADER = "with the header content-type: application/json"


class BodyReader:
    """Reads bodies of at most so many values, such as the numbers of a list, give or take the commas in texts."""

    def __init__(self, most_values: int) -> None:
        self._most_values = max(LEAST_VALUES, most_values)
        self._turn = asyncio.Lock()

    async def read(self, request: Request, form: type[B]) -> B:
        """The record in the body. Raises ApiError for what is none, Disconnected if it does not arrive."""
        try:
            async with asyncio.timeout(_ARRIVE_S):
                content = await request.body()
        except ClientDisconnect:
            raise Disconnected from None
        except TimeoutError:
            line = f"the body did not arrive within {_ARRIVE_S:g} s"
            raise ApiError(408, line, code="timeout", headers={"connection": "close"}) from None
        if not _is_json(request.headers.get("content-type", "")):
            raise ApiError(400, f"the body: must be a JSON object, {_HEADER}")
        if len(content) <= _SMALL:
            return self._record(content, form)
        async with self._turn:
            return await asyncio.to_thread(self._record, content, form)

    def _record(self, content: bytes, form: type[B]) -> B:
        if content.count(b",") > self._most_values:
            line = f"the body has more than {self._most_values} values; send fewer prompts in one request"
            raise ApiError(413, line, code="body_too_large")
        value = _read(content)
        if not isinstance(value, dict):
            raise ApiError(400, f"the body: must be a JSON object, {_HEADER}")
        try:
            return form.model_validate(value)
        except ValidationError as error:
            raise invalid_fields(error.errors(include_url=False, include_input=False)) from None
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None


def _read(content: bytes) -> Any:
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        line = f"{error.msg}, at character {error.pos}"
    except RecursionError:
        line = "it is nested too deeply"
    except ValueError:  # no UTF-8, or a number of thousands of digits
        line = "it has a number or a character that cannot be read"
    raise ApiError(400, f"the body is not JSON: {line}")


def _is_json(content_type: str) -> bool:
    """Browsers let other pages send bodies of other types without asking this server."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
