"""Compiles what replies have to follow before the engine is given it; what cannot be is a refusal that names its field.

It must not know routes or how grammars are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.grammars.compiler import TooBusyError
from actors.protocol.grammar import Grammar
from cluster.serving.errors import ApiError, too_many
from cluster.serving.reasoning import Beginning
from cluster.serving.requests import ChatRequest
from cluster.serving.served_model import ServedModel
from cluster.serving.tools import ToolDefinition

_COMPILE_S = 10.0
"""Limit for one grammar, once its turn has come, and before; those of the size that is allowed take a small part of
it."""
_MOST_TRIED = 32
"""Half of the compiled grammars that are kept."""
_BUSY = "many grammars are being compiled, or the machine is busy; try again later"
_TOOLS = "tools"
_NOT_STRICT = (
    f"{_TOOLS}: nothing can be prescribed for this model's own form of calls; leave strict out, or force a call"
)
_NO_END = "ignore_eos: a grammar ends with an end token; leave one of them out"


class GrammarCheck:
    """Compiles the grammars of requests for one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def check(self, grammar: Grammar | None, field: str) -> None:
        """Compile what the text has to follow, if anything. Raises ApiError if that does not work."""
        if grammar is None:
            return
        compiling = self._model.compile_grammar(grammar)
        waiting = asyncio.wrap_future(compiling)
        try:
            ended, _ = await asyncio.wait((waiting,), timeout=_COMPILE_S)
            if not ended and compiling.cancel():  # it had not begun
                raise too_many(_BUSY)
            if not ended:
                await asyncio.wait((waiting,), timeout=_COMPILE_S)
            if not waiting.done():
                line = f"{field}: takes longer than {_COMPILE_S:g} s to compile; use a simpler one"
                raise ApiError(400, line, param=field)
            waiting.result()
        except TooBusyError as error:
            raise too_many(_BUSY) from error
        except ValueError as error:
            line = str(error).partition(": ")[2]
            raise ApiError(400, f"{field}: {line}", param=field, code="invalid_grammar") from error
        finally:
            waiting.cancel()

    async def of_own_calls(self, body: ChatRequest, beginning: Beginning) -> Grammar | None:
        """What a reply follows whose calls, if there are any, have the model's own form. Functions that are strict
        follow their schemas, or the request is refused; of others, those whose schemas cannot be compiled may have any
        arguments, and nothing is prescribed where that does not help."""
        tools = body.callable_tools
        strict = [tool.function.is_strict for tool in tools]
        if body.ignore_eos and not any(strict):
            return None
        try:
            return await self._compiled(body, tools, beginning)
        except ApiError as error:
            if error.status_code != 400 or all(strict):
                raise
        tools = await self._loosened(body, tools)
        try:
            return await self._compiled(body, tools, beginning)
        except ApiError as error:
            if error.status_code != 400 or any(strict):
                raise
        return None

    async def _loosened(self, body: ChatRequest, tools: Sequence[ToolDefinition]) -> list[ToolDefinition]:
        """Those that are strict or can be compiled by themselves as they are, and the others with any arguments. What
        that takes is bounded: of many, and once the time is over, none is tried."""
        clock = asyncio.get_running_loop().time
        end = clock() + _COMPILE_S if len(tools) <= _MOST_TRIED else 0.0
        return [
            one
            if one.function.is_strict or (clock() < end and await self._can_follow(body, one))
            else one.with_any_arguments
            for one in tools
        ]

    async def _can_follow(self, body: ChatRequest, tool: ToolDefinition) -> bool:
        try:
            await self.check(self._model.native_grammar(body, [tool]), _TOOLS)
        except (ApiError, ValueError, RecursionError) as error:
            if isinstance(error, ApiError) and error.status_code != 400:
                raise
            return False
        return True

    async def _compiled(
        self, body: ChatRequest, tools: Sequence[ToolDefinition], beginning: Beginning
    ) -> Grammar | None:
        try:
            grammar = self._model.native_grammar(body, tools)
        except (ValueError, RecursionError) as error:
            line = error if isinstance(error, ValueError) else "a schema is nested too deeply"
            raise ApiError(400, f"{_TOOLS}: {line}", param=_TOOLS) from error
        if grammar is None:
            if any(tool.function.is_strict for tool in tools):
                raise ApiError(400, _NOT_STRICT, param=_TOOLS, code="unsupported_field")
            return None
        if body.ignore_eos:
            raise ApiError(400, _NO_END, param="ignore_eos")
        grammar = self._model.reasoning.grammar(grammar, beginning)
        await self.check(grammar, _TOOLS)
        return grammar
