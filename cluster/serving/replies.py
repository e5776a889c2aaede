"""Replies and stream chunks made of what was generated, in OpenAI's form, encoded by msgspec.

It must not know how tokens came about.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from cluster.completion import Piece
from cluster.observability.report import request_metrics
from cluster.serving.fingerprint import WeightNames
from cluster.serving.generation import Generation, RequestedText
from cluster.serving.logprobs import LogprobWriter
from cluster.serving.reply_records import (
    ApiReply,
    AssistantMessage,
    ChatChunk,
    ChatReply,
    CompletionDetails,
    CompletionReply,
    DeltaChoice,
    MessageChoice,
    MessageDelta,
    PromptDetails,
    ReplyMetrics,
    TextChoice,
    TokenSource,
    TokenUsage,
)

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """`/v1/completions`; `echoes` are the prompts' texts by choice, which come before the choice's own."""

    echoes: dict[int, str] = field(default_factory=dict)
    prefix: ClassVar[str] = "cmpl"
    reply: ClassVar[type[ApiReply]] = CompletionReply
    chunk: ClassVar[type[ApiReply]] = CompletionReply

    def whole(self, choice: RequestedText, text: str, reason: str | None) -> TextChoice:
        text = self.echoes.get(choice.index, "") + text
        return TextChoice(choice.index, text, finish_reason=reason)

    def opening(self, choice: RequestedText) -> TextChoice | None:
        """What comes before the first token."""
        echo = self.echoes.get(choice.index)
        return None if echo is None else TextChoice(choice.index, echo)

    def part(self, choice: RequestedText, piece: Piece) -> TextChoice:
        return TextChoice(choice.index, piece.text, finish_reason=piece.finish_reason)


@dataclass(frozen=True, slots=True)
class ChatForm:
    """`/v1/chat/completions`."""

    prefix: ClassVar[str] = "chatcmpl"
    reply: ClassVar[type[ApiReply]] = ChatReply
    chunk: ClassVar[type[ApiReply]] = ChatChunk

    def whole(self, choice: RequestedText, text: str, reason: str | None) -> MessageChoice:
        return MessageChoice(choice.index, AssistantMessage(text), finish_reason=reason)

    def opening(self, choice: RequestedText) -> DeltaChoice:
        return DeltaChoice(choice.index, MessageDelta("assistant", ""))

    def part(self, choice: RequestedText, piece: Piece) -> DeltaChoice:
        delta = MessageDelta(content=piece.text) if piece.text else MessageDelta()
        return DeltaChoice(choice.index, delta, finish_reason=piece.finish_reason)


ReplyForm = CompletionForm | ChatForm
"""The fields in which completions and chats differ."""


class ReplyWriter:
    """Writes the reply to one request, whole or in chunks."""

    def __init__(
        self,
        form: ReplyForm,
        model: str,
        request_id: str,
        num_spec_tokens: int,
        weights: WeightNames,
        logprobs: LogprobWriter | None = None,
        *,
        includes_proposers: bool = False,
        includes_tokens: bool = False,
    ) -> None:
        self._form = form
        self._includes_tokens = includes_tokens
        self._includes_proposers = includes_proposers
        self._logprobs = logprobs
        self._model = model
        self._num_spec_tokens = num_spec_tokens
        self._weights = weights
        self._id = f"{form.prefix}-{request_id}"
        self._created = int(time.time())
        self._encoder = msgspec.json.Encoder()

    def whole(self, generation: Generation) -> bytes:
        """All of it, once everything has ended."""
        choices = [
            self._form.whole(choice, choice.completion.text, choice.completion.finish_reason)
            for choice in generation.choices
        ]
        usage, metrics = final_usage_of(generation), self._metrics(generation)
        reply = self._reply(self._form.reply, choices, usage, metrics, version=generation.version)
        for choice, made in zip(generation.choices, choices, strict=True):
            made.seed, made.stop_reason = choice.seed, choice.completion.stop_reason
            if self._includes_tokens:
                made.token_ids = choice.completion.token_ids
                (made if isinstance(made, TextChoice) else reply).prompt_token_ids = choice.completion.prompt_token_ids
        if self._logprobs is not None:
            self._add_logprobs(self._logprobs, reply, generation)
        return self._encoder.encode(reply)

    def _add_logprobs(self, logprobs: LogprobWriter, reply: Any, generation: Generation) -> None:
        """Those of the prompt stand in each choice of a completion, and once in a chat, as in vLLM."""
        for choice, made in zip(generation.choices, reply.choices, strict=True):
            completion = choice.completion
            made.logprobs = logprobs.part(choice.index, completion, completion.logprobs or ())
            of_prompt = logprobs.prompt(completion)
            if of_prompt is not None:
                (made if isinstance(made, TextChoice) else reply).prompt_logprobs = of_prompt

    def opening(self, choice: RequestedText, piece: Piece, usage: TokenUsage | UnsetType | None) -> bytes:
        """The chunk before the first piece of a choice, if its form has one."""
        opening = self._form.opening(choice)
        if opening is None:
            return b""
        return self._event(self._reply(self._form.chunk, [opening], usage, version=piece.version))

    def chunk(self, choice: RequestedText, piece: Piece, usage: TokenUsage | UnsetType | None) -> bytes:
        part = self._form.part(choice, piece)
        reply = self._reply(self._form.chunk, [part], usage, version=piece.version)
        if piece.finish_reason is not None:
            part.seed, part.stop_reason = choice.seed, choice.completion.stop_reason
        if self._includes_tokens:
            part.token_ids = list(piece.token_ids)
            if not piece.position:
                (part if isinstance(part, TextChoice) else reply).prompt_token_ids = choice.completion.prompt_token_ids
        if self._logprobs is not None:
            of_part = self._logprobs.part(choice.index, choice.completion, piece.logprobs)
            part.logprobs = of_part  # pyright: ignore[reportAttributeAccessIssue]  (those of the form)
        if self._includes_proposers:
            parts = choice.completion.token_texts(piece)
            part.proposers = [
                TokenSource(text, "target" if name is None else "drafter", name or UNSET) for text, name in parts
            ]
        return self._event(reply)

    def closing(self, generation: Generation) -> bytes:
        """The chunk with the usage of the whole request, which has no choice."""
        usage, metrics = final_usage_of(generation), self._metrics(generation)
        return self._event(self._reply(self._form.chunk, [], usage, metrics, version=generation.version))

    def _metrics(self, generation: Generation) -> ReplyMetrics | None:
        stats = generation.stats
        if stats is None or not self._num_spec_tokens:
            return None
        return ReplyMetrics(request_metrics(stats, self._num_spec_tokens))

    def _event(self, chunk: ApiReply) -> bytes:
        return b"data: " + self._encoder.encode(chunk) + b"\n\n"

    def _reply(
        self,
        form: Callable[..., Any],
        choices: list[Any],
        usage: TokenUsage | UnsetType | None,
        metrics: ReplyMetrics | UnsetType | None = UNSET,
        *,
        version: int | None = None,
    ) -> Any:
        """A record of this form, of weights in this version."""
        return form(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._weights.of(version),
            choices=choices,
            usage=usage,
            metrics=metrics,
        )


def usage_of(generation: Generation, before: tuple[RequestedText, Piece] | None = None) -> TokenUsage:
    """Tokens so far, or `before` a choice had this first piece; a prompt counts once, however many choices it has."""
    choice, piece = before or (None, None)
    prompt, completion = generation.num_prompt_tokens, generation.num_tokens
    completion -= 0 if piece is None else len(piece.token_ids)
    cached = generation.num_cached_tokens
    usage = TokenUsage(prompt, completion, prompt + completion)
    if cached is not None:
        usage.prompt_tokens_details = PromptDetails(cached)
    if (reasoning := generation.num_reasoning_tokens(without=choice)) is not None:
        usage.completion_tokens_details = CompletionDetails(reasoning_tokens=reasoning)
    return usage


def final_usage_of(generation: Generation) -> TokenUsage:
    """That of all that was generated, with what became of a prediction."""
    usage, counts = usage_of(generation), generation.num_predicted
    if counts is not None:
        details = usage.completion_tokens_details or CompletionDetails()
        details.accepted_prediction_tokens, details.rejected_prediction_tokens = counts
        usage.completion_tokens_details = details
    return usage


def random_id() -> str:
    return secrets.token_hex(12)
