"""What clients may send: the bodies of the API's requests, under OpenAI's names and vLLM's for what OpenAI has not.

Defaults are OpenAI's. A field that is not here is refused by its name, unless its value asks for nothing: null stands
for an absent field, and `NEUTRAL` lists values of further fields that mean what this server does anyway. It must not
know engines; what needs the model is checked where the request is carried out.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AliasChoices, Field, model_validator

from actors.protocol.grammar import Grammar
from actors.protocol.logprobs import MOST_LOGPROBS
from actors.protocol.messages import LONGEST_SALT, MOST_PRIORITY, PLAIN_DECODING
from actors.protocol.sampling_params import (
    MOST_ALLOWED,
    MOST_BAD_WORDS,
    MOST_BIASES,
    MOST_STOP_TOKENS,
    MOST_STOPS,
    SamplingParams,
)
from cluster.serving.fields import BodyPart, at_most
from cluster.serving.grammars import ResponseFormat, StructuredOutputs
from cluster.serving.logprobs import AskedLogprobs
from cluster.serving.tools import (
    MOST_TOOLS,
    AllowedToolsChoice,
    CallMode,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    call_grammar,
    named_tools,
)
from parallel.ranges import LARGEST

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "annotations": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "include_obfuscation": (False,),
    "include_reasoning": (True,),
    "length_penalty": (1.0, 1),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prompt_cache_retention": ("in_memory",),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_interval": (1,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Fields that are not supported, with the values that ask for nothing."""

MOST_CHOICES = 128
"""OpenAI's limit."""
LONGEST_SEED = 2**63
DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion that names no limit, as OpenAI has it; a chat runs to the end of the context."""
NO_TEXT = "has half of a surrogate pair, which is no text"
_RANDOM_SEED_BITS = 48
"""A seed that is drawn has an exact value in every client: JavaScript's numbers have 53 bits."""


def _without_fields(names: dict[str, Any]) -> dict[str, Any]:
    for name in _SAID_BY_FIELDS:
        if name in names:
            raise ValueError(f"{name} is said by the request itself; leave it out here")
    return names


_SAID_BY_FIELDS = ("messages", "add_generation_prompt", "continue_final_message", "tools", "self")
"""Names that a chat template gets from elsewhere."""
_MOST_NAMES = 256
_MOST_METADATA = 16
"""OpenAI's limit."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""OpenAI's; what each means is said by the model's chat template."""
FIRST_ERROR = Field(fail_fast=True)
"""The first entry of a list that is wrong is its only error."""
TokenIds = Annotated[list[int], FIRST_ERROR]
TemplateNames = Annotated[dict[str, Any], at_most(_MOST_NAMES), AfterValidator(_without_fields)]
"""Further names that a chat template may read."""


class ApiRequest(BodyPart):
    """Base of all bodies."""

    neutral = NEUTRAL


class StreamOptions(ApiRequest):
    """What a stream says beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_proposers: bool = False


class SpeculationOptions(ApiRequest):
    """How one request is drafted for; by itself none of it changes a token."""

    enabled: bool = True
    drafter: str | None = None
    num_draft_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.enabled and (self.drafter not in (None, PLAIN_DECODING) or self.num_draft_tokens is not None):
            raise ValueError("says how to draft and is not enabled; leave one of them out")
        return self

    @property
    def chosen(self) -> str | None:
        """The request as `Client.submit` takes it."""
        return self.drafter if self.enabled else PLAIN_DECODING


class TextPart(ApiRequest):
    """A part of a message."""

    type: Literal["text"]
    text: str


TextContent = str | Annotated[list[TextPart], FIRST_ERROR]
"""A text, whole or in parts."""


class PredictedText(ApiRequest):
    """A text that the reply may follow, as a file that it edits: drafts are copied from it."""

    type: Literal["content"] = "content"
    content: TextContent

    @property
    def text(self) -> str:
        return joined(self.content)


class GenerationRequest(ApiRequest):
    """What completions and chats have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], at_most(MOST_BIASES)] = Field(default_factory=dict)
    bad_words: Annotated[list[str], at_most(MOST_BAD_WORDS)] = Field(default_factory=list)
    allowed_token_ids: Annotated[list[int], at_most(MOST_ALLOWED), Field(min_length=1)] | None = None
    stop: Annotated[str | list[str], at_most(MOST_STOPS)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], at_most(MOST_STOP_TOKENS)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None
    truncation_side: Literal["left", "right"] = "left"
    """Where tokens are left out."""
    min_tokens: int = 0
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-LONGEST_SEED, lt=LONGEST_SEED)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculative: SpeculationOptions = SpeculationOptions()
    prediction: PredictedText | None = None
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    metadata: Annotated[dict[str, str], at_most(_MOST_METADATA)] = Field(default_factory=dict)
    cache_salt: Annotated[str, Field(max_length=LONGEST_SALT)] = ""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def asked_logprobs(self) -> AskedLogprobs:
        """The log-probabilities that replies have."""
        return AskedLogprobs(None, self.prompt_logprobs, by_id=self.return_tokens_as_token_ids)

    @property
    def only_prompt(self) -> bool:
        """Whether nothing is to be generated."""
        return False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: is not for stream=true; leave one of them out")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens: leaves no token; give at least 1, or -1 for as many as fit")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is only for stream=true; leave it out")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("ignore_eos: a grammar ends with an end token; leave one of them out")
        for name, texts in (("stop", self.stop), ("bad_words", self.bad_words)):
            if not all(map(is_text, texts)):
                raise ValueError(f"{name}: {NO_TEXT}")
        return self

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the text has to follow, if anything."""
        return self._grammar()

    def _grammar(self) -> Grammar | None:
        given = self.response_format.grammar() if self.response_format is not None else None
        if self.structured_outputs is None:
            return given
        if given is not None:
            raise ValueError("structured_outputs: response_format says something else; leave one of them out")
        return self.structured_outputs.grammar()

    @property
    def grammar_field(self) -> str:
        """The field that says it."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def includes_proposers(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_proposers

    @property
    def usage_everywhere(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def seeds(self) -> list[int]:
        """One for each choice of a prompt: the first is `seed`, or random; the least follows the largest. Each gives
        its choice when sent alone."""
        first = secrets.randbits(_RANDOM_SEED_BITS) if self.seed is None else self.seed
        return [(first + place + LONGEST_SEED) % (2 * LONGEST_SEED) - LONGEST_SEED for place in range(self.n)]

    def sampling(self, bad_words: tuple[tuple[int, ...], ...], max_tokens: int) -> SamplingParams:
        """The sampling as the engine has it, with `bad_words` in tokens; the seed is left at 0. Raises ValueError, one
        line, for a value out of range."""
        params = SamplingParams(
            temperature=self.temperature,
            top_k=0 if self.top_k == -1 else self.top_k,  # vLLM has both for all tokens
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple([(_token(name), bias) for name, bias in self.logit_bias.items()]),
            bad_words=bad_words,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
        )
        params.check()
        return params


class CompletionRequest(GenerationRequest):
    """`/v1/completions`."""

    add_special_tokens: bool = True
    prompt: str | Annotated[list[str], FIRST_ERROR] | TokenIds | Annotated[list[TokenIds], FIRST_ERROR]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def asked_logprobs(self) -> AskedLogprobs:
        return replace(super().asked_logprobs, generated=self.logprobs, echoes=self.echo)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry for each prompt."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]  # pyright: ignore[reportReturnType]  (the first of a list tells what all are)
        return list(prompt)  # pyright: ignore[reportReturnType]

    @property
    def only_prompt(self) -> bool:
        return self.echo and self.max_tokens == 0

    @property
    def limit(self) -> int | None:
        if self.only_prompt:
            return 1  # which the engine generates, and which is no part of the reply
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class ChatMessage(ApiRequest):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextContent | None = None
    reasoning: Annotated[str, Field(validation_alias=AliasChoices("reasoning", "reasoning_content"))] = ""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_ERROR] | None = None
    tool_call_id: str | None = None
    parsed: Any = None
    """What OpenAI's client made of the content, which it sends back with a message that it was given."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.content is None and not (self.tool_calls or self.reasoning):
            raise ValueError("content: is missing; only a message with tool_calls or reasoning may have none")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: are made by the role assistant alone")
        if self.reasoning and self.role != "assistant":
            raise ValueError("reasoning: is written by the role assistant alone")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id: is for the role tool, which needs it")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it. Raises ValueError, one line, for calls that are none."""
        message: dict[str, Any] = {"role": self.role, "content": joined(self.content or "")}
        message |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
Tools = Annotated[list[ToolDefinition], FIRST_ERROR, at_most(MOST_TOOLS)]


class TemplateFields(ApiRequest):
    """What a chat template is given."""

    messages: Messages | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateNames = Field(default_factory=dict)
    reasoning_effort: ReasoningEffort | None = None
    tools: Tools = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_continued(self) -> Self:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise ValueError("continue_final_message: begins no message; set add_generation_prompt=false with it")
        if not self.messages or self.messages[-1].content is None:
            raise ValueError("continue_final_message: the last message has no content that could go on")
        return self

    @property
    def continued(self) -> str:
        """The text of the message that goes on, if one does."""
        return joined(self.messages[-1].content or "") if self.messages and self.continue_final_message else ""

    @property
    def offered_tools(self) -> list[ToolDefinition]:
        """Those that the template writes."""
        return self.tools


class ChatRequest(TemplateFields, GenerationRequest):
    """`/v1/chat/completions`."""

    messages: Messages  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]  (needed here)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: have two functions of one name")
        if self.offered_tools and super()._grammar() is not None:
            raise ValueError("tools: cannot be used with response_format or structured_outputs; set tool_choice=none")
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs=true; set it or leave this out")
        return self

    @property
    def asked_logprobs(self) -> AskedLogprobs:
        return replace(super().asked_logprobs, generated=self.top_logprobs if self.logprobs else None, is_chat=True)

    @property
    def choice(self) -> CallMode:
        """Whether tools may or must be called."""
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice or "auto"

    @property
    def callable_names(self) -> list[str] | None:
        """Names of the offered tools that may be called; None: all."""
        if not isinstance(self.tool_choice, AllowedToolsChoice):
            return None
        return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]

    @property
    def offered_tools(self) -> list[ToolDefinition]:
        """Those that the template writes: the model may call them, or some of them."""
        return [] if self.choice == "none" else self.tools

    @property
    def may_call(self) -> bool:
        """Whether the model decides on calls itself."""
        return bool(self.offered_tools) and self.choice == "auto"

    @property
    def callable_tools(self) -> list[ToolDefinition]:
        """Those that may be called. Raises ValueError, one line, where there is none of a name."""
        names = self.callable_names
        return self.offered_tools if names is None else named_tools(self.tools, names)

    def _grammar(self) -> Grammar | None:
        """That of a forced call, or what else the text has to follow."""
        forced = call_grammar(self.callable_tools, self.choice, is_parallel=self.parallel_tool_calls)
        return super()._grammar() if forced is None else forced

    @property
    def grammar_field(self) -> str:
        return "tools" if self.offered_tools else super().grammar_field

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: says the same as max_completion_tokens; leave one of them out")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens at most; None: to the end of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(TemplateFields):
    """`/tokenize`: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give it, or messages, and not both")
        return self


class DetokenizeRequest(ApiRequest):
    """`/detokenize`."""

    model: str | None = None
    tokens: TokenIds


def joined(content: str | list[TextPart]) -> str:
    """The text of a content, whole or in parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def is_text(text: str) -> bool:
    """JSON can hold halves of surrogate pairs, which no text has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _token(name: str) -> int:
    if not name.isdecimal() or not name.isascii() or len(name) > 10:
        raise ValueError(f"logit_bias: {name!r:.40} is no token id")
    return int(name)
