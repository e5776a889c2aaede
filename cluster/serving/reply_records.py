"""The records that the server sends, whole or in the chunks of a stream, under OpenAI's names and vLLM's.

Beside OpenAI's fields, a choice has the `seed` that gives it again, and vLLM's `stop_reason` at its end; a reply has
`metrics`, as vLLM's. A field that may be absent is UNSET then; all others are always there. The description of the API
is made from these records. It must not know how tokens came about.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from cluster.observability.report import RequestMetrics
from cluster.serving.logprobs import ChatLogprobs, PromptToken, TextLogprobs

PromptLogprobs = list[dict[str, PromptToken] | None]
"""vLLM's `prompt_logprobs`, by token ids; null for the first token."""


class CompletionDetails(Struct, kw_only=True):
    """Tokens of all choices together: of their reasoning, where the model may reason, and what became of a
    prediction's, if one was given."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class PromptDetails(Struct):
    """How many tokens of the prompt the target had read before."""

    cached_tokens: int


class TokenUsage(Struct):
    """`usage` of a reply. Details of the prompt, and of a prediction, are known at its end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    prompt_tokens_details: PromptDetails | UnsetType = UNSET


class ReplyMetrics(Struct):
    """How speculation went, in vLLM's words."""

    speculative_decoding: RequestMetrics


class TokenSource(Struct):
    """The text of a token, and who proposed it: the drafter or the target. `level` is the name of the drafter where
    there are several, or of a cascade's level, or `grammar`."""

    text: str
    by: Literal["drafter", "target"]
    level: str | UnsetType = UNSET


class ReplyChoice(Struct, kw_only=True):
    """What choices of completions and of chats have in common, whole or in a chunk."""

    finish_reason: str | None = None
    seed: int | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(ReplyChoice):
    """A choice of a completion, or what it gained in a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    proposers: list[TokenSource] | UnsetType = UNSET


class FunctionDelta(Struct):
    """What a called function gained; its name comes first."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """What a call gained in a chunk."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageFunction(Struct):
    """The function that a message calls; `arguments` is JSON."""

    name: str
    arguments: str


class MessageCall(Struct):
    """A call of a message."""

    id: str
    function: MessageFunction
    type: Literal["function"] = "function"


class AssistantMessage(Struct):
    """The answer in a chat."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET


class MessageDelta(Struct):
    """What it gained in a chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class MessageChoice(ReplyChoice):
    """A choice of a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class DeltaChoice(ReplyChoice):
    """A choice of a chat in a chunk."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    proposers: list[TokenSource] | UnsetType = UNSET


class ApiReply(Struct, kw_only=True):
    """A reply, or a chunk of a stream. `system_fingerprint` names the weights that made it, in their version."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]


class CompletionReply(ApiReply, kw_only=True):
    """A completion, or a chunk of one. `usage` is null or absent in chunks that have none, as OpenAI's."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    metrics: ReplyMetrics | UnsetType | None = UNSET


class ChatReply(ApiReply, kw_only=True):
    """An answer in a chat."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[MessageChoice]
    usage: TokenUsage
    metrics: ReplyMetrics | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(ApiReply, kw_only=True):
    """A chunk of one. `usage` is null or absent in chunks that have none."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[DeltaChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    metrics: ReplyMetrics | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelEntry(Struct):
    """The model that is served. `max_model_len` counts tokens, `created` seconds since 1970."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "specdec"


class ModelList(Struct):
    """`/v1/models`."""

    data: list[ModelEntry]
    object: Literal["list"] = "list"


class TokenizeReply(Struct):
    """`/tokenize`. `token_strs` are entries of the vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(Struct):
    """`/detokenize`."""

    prompt: str


class VersionReply(Struct):
    """`/version`; null where the engine runs without being installed."""

    version: str | None


class LaneSpan(Struct):
    """What a role did from `start_ms` to `end_ms`, milliseconds from the first span."""

    lane: str
    name: str
    start_ms: float
    end_ms: float


class SpanKind(Struct):
    """How the spans of one name are drawn, and what they are."""

    colour: str
    meaning: str


class RecentRounds(Struct):
    """`/timeline`: the lanes in drawing order, their spans, and the kinds of these by name."""

    lanes: list[str]
    spans: list[LaneSpan]
    names: dict[str, SpanKind]
