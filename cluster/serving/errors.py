"""Refusals in the form of OpenAI's API: a status, and a body that names the field and says what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cluster.completion import EngineError, RuledOutError, TooManyRequestsError

RETRY_AFTER_S = 1
"""Seconds after which a request that found no place may come again, if nothing is known of when there will be one."""
_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""`error.type` by status; others are an `invalid_request_error`."""
_UNION = re.compile(r"str|int|list\[.*\]|tagged-union\[.*\]|literal\[.*\]|NamedTool|AllowedToolsChoice")
"""What pydantic adds to the place of an error in one of several types that a field may have."""
_GROUP = re.compile(r"\bsampling\.(?=[a-z])")
_SHOWN = 400
"""Characters of a message: it may quote the request."""


_CLIENT_CLOSED = 499
"""Status of a request whose client has gone: for logs alone."""


class Disconnected(Exception):
    """The client has gone; nothing can be sent to it."""


class ApiError(HTTPException):
    """Ends a request with this status; `param` is the field at fault, `code` a name for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param = param
        self.code = code


def bad_request(error: ValueError) -> ApiError:
    """A refusal that begins with the field's name, as all lines of the engine do: `sampling.top_p=2: must be ...`. A
    request's fields have no group."""
    line = _GROUP.sub("", str(error))
    field = line.partition(":")[0].partition("=")[0]
    return ApiError(400, line, param=field if field.replace("_", "").replace(".", "").isalnum() else None)


def engine_failure(error: EngineError) -> ApiError:
    """A request that the engine could not finish."""
    if isinstance(error, TooManyRequestsError):
        return too_many(str(error))
    if isinstance(error, RuledOutError):
        return ApiError(400, str(error), code="no_token_allowed")
    return ApiError(500, str(error), code="engine_error", headers={"x-should-retry": "false"})


def too_many(message: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": str(retry_after_s)})


def timed_out(seconds: float) -> ApiError:
    """Clients do not repeat it by themselves: it would take as long again."""
    message = f"the request took longer than {seconds:g} s (server.timeout_s) and was aborted"
    return ApiError(504, message, code="timeout", headers={"x-should-retry": "false"})


def invalid_fields(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that pydantic found wrong with a body; where a field may be of several types, that of the type
    which came furthest."""
    first = max((one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]), key=_reach)
    name = ".".join(_place(first)) or None
    match first["type"]:
        case "extra_forbidden":
            line = f"{name}: is not supported by this server; leave it out"
            return ApiError(400, line, param=name, code="unsupported_field")
        case "value_error":
            return bad_request(ValueError(f"{name}: {first['ctx']['error']}" if name else first["ctx"]["error"]))
    return ApiError(400, f"{name or 'the body'}: {first['msg'][0].lower()}{first['msg'][1:]}", param=name)


def _reach(error: Mapping[str, Any]) -> tuple[int, list[int]]:
    """How far reading came: into how many fields, and to which entries of lists."""
    return len(_place(error)), [part for part in error["loc"] if isinstance(part, int)]


def _place(error: Mapping[str, Any]) -> list[str]:
    """The names of the field and of what it is in."""
    return [str(part) for part in error["loc"] if not _UNION.fullmatch(str(part))]


_FIELDS = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"]},
    "code": {"type": ["string", "null"]},
}
_ERROR = {"type": "object", "properties": _FIELDS, "required": [*_FIELDS], "additionalProperties": False}
ERROR_SCHEMA = {"type": "object", "properties": {"error": _ERROR}, "required": ["error"]}
"""What `body_of` makes, for the description of the API."""


def body_of(error: HTTPException) -> bytes:
    """The error as JSON. ASCII: the message may quote text that has no UTF-8."""
    fields = {
        "message": str(error.detail)[:_SHOWN],
        "type": _TYPES.get(error.status_code, "invalid_request_error"),
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
    }
    return json.dumps({"error": fields}).encode()


def answer(error: HTTPException) -> Response:
    return Response(body_of(error), error.status_code, error.headers, media_type="application/json")


async def answer_refusal(request: Request, error: Exception) -> Response:
    """The answer to a request that ended with an error, for FastAPI."""
    match error:
        case Disconnected():
            return Response(status_code=_CLIENT_CLOSED)
        case EngineError():
            return answer(engine_failure(error))
        case HTTPException(status_code=404) if not isinstance(error, ApiError):
            return answer(ApiError(404, f"there is no route {request.url.path}; /openapi.json has those there are"))
        case HTTPException(status_code=405) if error.headers is not None:
            allowed = error.headers["Allow"]
            line = f"{request.url.path} is not for {request.method:.20}; use {allowed}"
            return answer(ApiError(405, line, headers=error.headers))
        case HTTPException():
            return answer(error)
    return answer(ApiError(500, "the server failed; its log has the reason"))
