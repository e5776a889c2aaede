"""Replies of chats with tools: each part of a text goes to the message's content or to its calls.

It must not know how calls are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import UNSET

from cluster.completion import Piece
from cluster.serving.generation import RequestedText
from cluster.serving.replies import (
    AssistantMessage,
    CallDelta,
    ChatForm,
    DeltaChoice,
    FunctionDelta,
    MessageChoice,
    MessageDelta,
)
from cluster.serving.tools import CallPart, CallReader, Part


@dataclass(frozen=True, slots=True)
class ToolForm(ChatForm):
    """`/v1/chat/completions` with tools. `make_reader` is called once for each choice; a reply with calls ends with
    `end_reason`. Only the first `most_calls` calls are sent (None: all)."""

    make_reader: Callable[[], CallReader] = field(kw_only=True)
    end_reason: str = field(default="tool_calls", kw_only=True)
    most_calls: int | None = field(default=None, kw_only=True)
    _readers: dict[int, CallReader] = field(default_factory=dict, init=False)
    _calling: set[int] = field(default_factory=set, init=False)

    def whole(self, choice: RequestedText, text: str, reason: str | None) -> MessageChoice:
        reader = self.make_reader()
        parts = self._sent([*reader.feed(text), *reader.end()])
        content = "".join([part for part in parts if isinstance(part, str)])
        calls: list[CallDelta] = []
        for part in parts:
            if isinstance(part, CallPart) and part.id is not None:
                calls.append(CallDelta(UNSET, FunctionDelta(part.arguments, part.name or UNSET), part.id, "function"))
            elif isinstance(part, CallPart):
                calls[part.index].function.arguments += part.arguments
        message = AssistantMessage(content if content or not calls else None, tool_calls=calls or UNSET)
        return MessageChoice(choice.index, message, None, self._reason(reason, bool(calls)), choice.seed)

    def part(self, choice: RequestedText, piece: Piece) -> DeltaChoice:
        reader = self._readers.setdefault(choice.index, self.make_reader())
        parts = reader.feed(piece.text) + (reader.end() if piece.finish_reason is not None else [])
        parts = self._sent(parts)
        content = "".join([part for part in parts if isinstance(part, str)])
        calls = _deltas(parts)
        if calls:
            self._calling.add(choice.index)
        delta = MessageDelta(content=content or UNSET, tool_calls=calls or UNSET)
        reason = self._reason(piece.finish_reason, choice.index in self._calling)
        return DeltaChoice(choice.index, delta, None, reason, UNSET if reason is None else choice.seed)

    def _sent(self, parts: list[Part]) -> list[Part]:
        most = self.most_calls
        return [part for part in parts if isinstance(part, str) or most is None or part.index < most]

    def _reason(self, reason: str | None, has_calls: bool) -> str | None:
        return self.end_reason if reason == "stop" and has_calls else reason


def _deltas(parts: list[Part]) -> list[CallDelta]:
    """The calls among parts, as OpenAI has them."""
    calls = [part for part in parts if isinstance(part, CallPart)]
    return [
        CallDelta(
            part.index,
            FunctionDelta(part.arguments, part.name or UNSET),
            part.id or UNSET,
            UNSET if part.id is None else "function",
        )
        for part in calls
    ]
