"""Replies of chats whose texts have parts: each piece of a text goes to the message's reasoning, content or calls.

It must not know how the parts are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from cluster.completion import Piece
from cluster.serving.call_readers import CallPart, CallReader, Part
from cluster.serving.generation import RequestedText
from cluster.serving.reasoning import ReasoningReader
from cluster.serving.replies import ChatForm
from cluster.serving.reply_records import (
    AssistantMessage,
    CallDelta,
    DeltaChoice,
    FunctionDelta,
    MessageCall,
    MessageChoice,
    MessageDelta,
    MessageFunction,
)


@dataclass(frozen=True, slots=True)
class PartReader:
    """Reads the text of one reply: reasoning, and what `calls` makes of the answer."""

    reasoning: ReasoningReader
    calls: CallReader | None = None

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[Part]]:
        """What the reasoning and the answer gained."""
        reasoning, answer = self.reasoning.feed(text)
        if is_last:
            more = self.reasoning.end()
            reasoning, answer = reasoning + more[0], answer + more[1]
        if self.calls is None:
            return reasoning, [answer] if answer else []
        return reasoning, self.calls.feed(answer) + (self.calls.end() if is_last else [])


@dataclass(frozen=True, slots=True)
class PartsForm(ChatForm):
    """`/v1/chat/completions` with reasoning or tools. `make_reader` is called once for each choice; a reply with calls
    ends with `end_reason`. Only the first `most_calls` calls are sent (None: all), and reasoning if
    `includes_reasoning`."""

    make_reader: Callable[[], PartReader] = field(kw_only=True)
    end_reason: str = field(default="tool_calls", kw_only=True)
    most_calls: int | None = field(default=None, kw_only=True)
    includes_reasoning: bool = field(default=True, kw_only=True)
    _readers: dict[int, PartReader] = field(default_factory=dict, init=False)
    _calling: set[int] = field(default_factory=set, init=False)

    def whole(self, choice: RequestedText, text: str, reason: str | None) -> MessageChoice:
        reasoning, parts = self.make_reader().feed(text, is_last=True)
        content = "".join([part for part in parts if isinstance(part, str)])
        calls: list[MessageCall] = []
        for part in self._sent(parts):
            if part.id is not None:
                calls.append(MessageCall(part.id, MessageFunction(part.name or "", part.arguments)))
            else:
                calls[part.index].function.arguments += part.arguments
        shown = None if not content and (calls or reasoning) else content
        message = AssistantMessage(shown, reasoning=self._shown(reasoning), tool_calls=calls or UNSET)
        return MessageChoice(choice.index, message, finish_reason=self._reason(reason, bool(calls)))

    def part(self, choice: RequestedText, piece: Piece) -> DeltaChoice:
        reader = self._readers.setdefault(choice.index, self.make_reader())
        reasoning, parts = reader.feed(piece.text, is_last=piece.finish_reason is not None)
        content = "".join([part for part in parts if isinstance(part, str)])
        calls = _deltas(self._sent(parts))
        if calls:
            self._calling.add(choice.index)
        delta = MessageDelta(UNSET, content or UNSET, self._shown(reasoning), calls or UNSET)
        reason = self._reason(piece.finish_reason, choice.index in self._calling)
        return DeltaChoice(choice.index, delta, finish_reason=reason)

    def _sent(self, parts: list[Part]) -> list[CallPart]:
        most = self.most_calls
        return [part for part in parts if isinstance(part, CallPart) and (most is None or part.index < most)]

    def _shown(self, reasoning: str) -> str | UnsetType:
        return reasoning if reasoning and self.includes_reasoning else UNSET

    def _reason(self, reason: str | None, has_calls: bool) -> str | None:
        return self.end_reason if reason == "stop" and has_calls else reason


def _deltas(calls: list[CallPart]) -> list[CallDelta]:
    """The calls as OpenAI has them."""
    return [
        CallDelta(
            part.index,
            FunctionDelta(part.arguments, part.name or UNSET),
            part.id or UNSET,
            UNSET if part.id is None else "function",
        )
        for part in calls
    ]
