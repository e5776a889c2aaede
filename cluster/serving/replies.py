"""What the server sends: replies and stream chunks in OpenAI's form, encoded by msgspec.

Beside OpenAI's fields, a choice has the `seed` that gives it again, and vLLM's `stop_reason` at its end; a reply has
`metrics`, as vLLM's. It must not know how tokens came about.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from cluster.completion import Piece
from cluster.observability.report import request_metrics
from cluster.serving.generation import Generation, RequestedText
from cluster.serving.logprobs import ChatLogprobs, LogprobWriter, TextLogprobs

DONE = b"data: [DONE]\n\n"


class CompletionDetails(Struct):
    """What became of a prediction's tokens, in all choices together."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class PromptDetails(Struct):
    """How many tokens of the prompt the target had read before."""

    cached_tokens: int


class TokenUsage(Struct):
    """`usage` of a reply; the details are known at its end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    prompt_tokens_details: PromptDetails | UnsetType = UNSET


class TokenSource(Struct, omit_defaults=True):
    """The text of a token, and who proposed it: the drafter or the target. `level` is the name of the drafter where
    there are several, or of a cascade's level, or `grammar`."""

    text: str
    by: str
    level: str = ""


class ReplyChoice(Struct, kw_only=True):
    """What choices of completions and of chats have in common, whole or in a chunk."""

    logprobs: TextLogprobs | ChatLogprobs | None = None
    finish_reason: str | None = None
    seed: int | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    proposers: list[TokenSource] | UnsetType = UNSET


class TextChoice(ReplyChoice):
    """A choice of a completion, or what it gained in a chunk."""

    index: int
    text: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class FunctionDelta(Struct, omit_defaults=True):
    """What a called function gained; its name comes first."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct, omit_defaults=True):
    """What a call gained in a chunk; in a message, a whole call."""

    index: int | UnsetType
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class AssistantMessage(Struct):
    """The answer in a chat."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class MessageDelta(Struct, omit_defaults=True):
    """What it gained in a chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class MessageChoice(ReplyChoice):
    """A choice of a chat."""

    index: int
    message: AssistantMessage


class DeltaChoice(ReplyChoice):
    """A choice of a chat in a chunk."""

    index: int
    delta: MessageDelta


class ApiReply(Struct):
    """A reply, or a chunk of a stream. `usage` is null or absent in chunks that have none, as OpenAI's."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: TokenUsage | UnsetType | None = UNSET
    metrics: dict[str, Any] | UnsetType | None = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """`/v1/completions`; `echoes` are the prompts' texts by choice, which come before the choice's own."""

    echoes: dict[int, str] = field(default_factory=dict)
    prefix: str = "cmpl"
    object: str = "text_completion"
    chunk_object: str = "text_completion"

    def whole(self, choice: RequestedText, text: str, reason: str | None) -> TextChoice:
        text = self.echoes.get(choice.index, "") + text
        return TextChoice(choice.index, text, finish_reason=reason, seed=choice.seed)

    def opening(self, choice: RequestedText) -> TextChoice | None:
        """What comes before the first token."""
        echo = self.echoes.get(choice.index)
        return None if echo is None else TextChoice(choice.index, echo)

    def part(self, choice: RequestedText, piece: Piece) -> TextChoice:
        seed = UNSET if piece.finish_reason is None else choice.seed
        return TextChoice(choice.index, piece.text, finish_reason=piece.finish_reason, seed=seed)


@dataclass(frozen=True, slots=True)
class ChatForm:
    """`/v1/chat/completions`."""

    prefix: str = "chatcmpl"
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def whole(self, choice: RequestedText, text: str, reason: str | None) -> MessageChoice:
        return MessageChoice(choice.index, AssistantMessage(text), finish_reason=reason, seed=choice.seed)

    def opening(self, choice: RequestedText) -> DeltaChoice:
        return DeltaChoice(choice.index, MessageDelta("assistant", ""))

    def part(self, choice: RequestedText, piece: Piece) -> DeltaChoice:
        seed = UNSET if piece.finish_reason is None else choice.seed
        delta = MessageDelta(content=piece.text) if piece.text else MessageDelta()
        return DeltaChoice(choice.index, delta, finish_reason=piece.finish_reason, seed=seed)


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
        reply = self._reply(self._form.object, choices, usage, metrics)
        for choice, made in zip(generation.choices, choices, strict=True):
            made.stop_reason = choice.completion.stop_reason
            if self._includes_tokens:
                made.token_ids = choice.completion.token_ids
                (made if isinstance(made, TextChoice) else reply).prompt_token_ids = choice.completion.prompt_token_ids
        if self._logprobs is not None:
            self._add_logprobs(self._logprobs, reply, generation)
        return self._encoder.encode(reply)

    def _add_logprobs(self, logprobs: LogprobWriter, reply: ApiReply, generation: Generation) -> None:
        """Those of the prompt stand in each choice of a completion, and once in a chat, as in vLLM."""
        for choice, made in zip(generation.choices, reply.choices, strict=True):
            completion = choice.completion
            made.logprobs = logprobs.part(choice.index, completion, completion.logprobs or ())
            of_prompt = logprobs.prompt(completion)
            if of_prompt is not None:
                (made if isinstance(made, TextChoice) else reply).prompt_logprobs = of_prompt

    def opening(self, generation: Generation, usage: TokenUsage | UnsetType | None) -> bytes:
        """The chunks before the first token."""
        openings = [self._form.opening(choice) for choice in generation.choices]
        return b"".join([self._event([one], usage) for one in openings if one is not None])

    def chunk(self, choice: RequestedText, piece: Piece, usage: TokenUsage | UnsetType | None) -> bytes:
        part = self._form.part(choice, piece)
        if piece.finish_reason is not None:
            part.stop_reason = choice.completion.stop_reason
        prompt: list[int] | UnsetType = UNSET
        if self._includes_tokens:
            part.token_ids = list(piece.token_ids)
            prompt = UNSET if piece.position else choice.completion.prompt_token_ids
            if isinstance(part, TextChoice):
                part.prompt_token_ids, prompt = prompt, UNSET
        if self._logprobs is not None:
            part.logprobs = self._logprobs.part(choice.index, choice.completion, piece.logprobs)
        if self._includes_proposers:
            parts = choice.completion.token_texts(piece)
            part.proposers = [
                TokenSource(text, "target" if name is None else "drafter", name or "") for text, name in parts
            ]
        return self._event([part], usage, prompt=prompt)

    def closing(self, generation: Generation) -> bytes:
        """The chunk with the usage of the whole request, which has no choice."""
        return self._event([], final_usage_of(generation), self._metrics(generation))

    def _metrics(self, generation: Generation) -> dict[str, Any] | None:
        stats = generation.stats
        if stats is None or not self._num_spec_tokens:
            return None
        return {"speculative_decoding": request_metrics(stats, self._num_spec_tokens)}

    def _event(
        self,
        choices: list[Any],
        usage: TokenUsage | UnsetType | None,
        metrics: dict[str, Any] | UnsetType | None = UNSET,
        prompt: list[int] | UnsetType = UNSET,
    ) -> bytes:
        reply = self._reply(self._form.chunk_object, choices, usage, metrics)
        reply.prompt_token_ids = prompt
        return b"data: " + self._encoder.encode(reply) + b"\n\n"

    def _reply(
        self,
        kind: str,
        choices: list[Any],
        usage: TokenUsage | UnsetType | None,
        metrics: dict[str, Any] | UnsetType | None,
    ) -> ApiReply:
        return ApiReply(self._id, kind, self._created, self._model, choices, usage, metrics)


def usage_of(generation: Generation) -> TokenUsage:
    """Tokens so far; a prompt counts once, however many choices it has."""
    prompt, completion, cached = generation.num_prompt_tokens, generation.num_tokens, generation.num_cached_tokens
    details = UNSET if cached is None else PromptDetails(cached)
    return TokenUsage(prompt, completion, prompt + completion, prompt_tokens_details=details)


def final_usage_of(generation: Generation) -> TokenUsage:
    """That of all that was generated, with what became of a prediction."""
    usage, counts = usage_of(generation), generation.num_predicted
    if counts is not None:
        usage.completion_tokens_details = CompletionDetails(*counts)
    return usage


def random_id() -> str:
    return secrets.token_hex(12)
