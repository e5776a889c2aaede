"""The model behind the API: its name, its context, how text becomes its tokens, and how a request reaches the engine.

It must not know HTTP, but for the refusals that a request can earn here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.normalizers import NFC

from actors.drafters.config import NoDrafterConfig
from actors.drafters.vocabulary.token_pieces import TokenPieces
from actors.protocol.grammar import Grammar
from actors.protocol.messages import PLAIN_DECODING, SamplingParams, check_tokens
from actors.protocol.sampling_params import MOST_BAD_WORD_TOKENS
from cluster.config.schema import LaunchConfig
from cluster.engine import Client
from cluster.io.text import bad_word_tokens, read_eos_token_ids
from cluster.observability.metrics import metric_labels, model_name
from cluster.observability.prometheus import MetricsPage, RequestHistograms
from cluster.observability.timeline import WORK, lanes_of, last_rounds
from cluster.serving.added_tokens import AddedTokens
from cluster.serving.call_forms import CallForm, native_form
from cluster.serving.call_readers import ArgumentsReader, CallListReader, CallReader
from cluster.serving.chat_template import ChatTemplate
from cluster.serving.errors import ApiError, bad_request
from cluster.serving.fingerprint import WeightNames
from cluster.serving.generation import RequestedText
from cluster.serving.logprobs import TokenNames
from cluster.serving.reasoning import Beginning, ReasoningCount, ReasoningMarks
from cluster.serving.reply_records import LaneSpan, RecentRounds, SpanKind
from cluster.serving.requests import (
    NO_TEXT,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    SpeculationOptions,
    TemplateFields,
    is_text,
)
from cluster.serving.tools import NamedTool, ToolDefinition
from cluster.serving.truncation import Truncation


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Tokens of the texts that a request has beside its prompts."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    prediction: Sequence[int] = ()


NO_TEXTS = EncodedTexts()
_ROUNDS_SHOWN = 12
_MOST_CHARACTERS_A_TOKEN = 1024
"""A text of more characters for each token of the context is refused before it is tokenised."""
LONG = 2048
"""Characters or tokens from which on a text is given to the tokenizer as a batch of one: it then lets other threads run
meanwhile, which takes a little longer to begin."""


class ServedModel:
    """The target of the engine that `client` is connected to."""

    def __init__(self, client: Client, config: LaunchConfig) -> None:
        checkpoint = Path(config.target.path)
        facts = client.ready["target-0"].facts
        self.name = model_name(config)
        self.created = int(time.time())
        target = config.target
        self.weight_names = WeightNames(checkpoint, (target.dtype, target.weights, target.kv_dtype))
        self.max_model_len = int(facts["max_model_len"])
        self._max_source_len = int(facts.get("max_source_len", 0))
        self._start_len = len(facts.get("text_start", ()))
        self.vocab_size = int(facts["vocab_size"])
        self.num_spec_tokens = config.drafter.num_draft_tokens if config.pipeline.name.drafts else 0
        self._drafter = config.drafter if self.num_spec_tokens else NoDrafterConfig()
        self._kv_slots = int(facts["kv_slots"])
        self._longest = min(self.max_model_len, self._kv_slots)
        self.histograms = RequestHistograms(metric_labels(config))
        self._labels = metric_labels(config)
        self._has_alias = config.server.metrics_alias != "none"
        self._client = client
        self._tokenizer = client.tokenizer
        self._most_characters = self.max_model_len * _most_characters_a_token(client.tokenizer)
        self._checkpoint = checkpoint
        self._template = ChatTemplate.read(checkpoint)
        source = self._template.source if self._template else ""
        tokens = AddedTokens(self._tokenizer, read_eos_token_ids(checkpoint))
        self._call_form = native_form(source, ChatTemplate.read_response_template(checkpoint), tokens)
        self._follows_grammars = "block_size" not in facts  # else the target fills masks in an order of its own
        self.reasoning = ReasoningMarks(self._tokenizer, source)

    def check_alive(self) -> None:
        """Raise EngineError once the engine has failed."""
        self._client.check_alive()

    def generate_token(self, timeout_s: float) -> None:
        """The first passes allocate memory and choose kernels."""
        self.weight_names.of(self._client.submit([0], SamplingParams(max_tokens=1)).result(timeout_s).version)

    def compile_grammar(self, grammar: Grammar) -> Future[Any]:
        """Done once it can be used; its error is a ValueError, one line, if it cannot. Cancel it to give up."""
        return self._client.grammars.start(grammar)

    def metrics(self) -> bytes:
        """What Prometheus reads; asks the coordinator, so call it off the event loop and one at a time."""
        client, report = self._client, self._client.report(spans=False)
        return MetricsPage(report, list(client.ready.values()), self._labels, self.histograms, self._has_alias).text()

    def timeline(self) -> RecentRounds:
        """The lanes of the latest rounds. Asks the coordinator, as `metrics`."""
        spans = last_rounds(self._client.report().spans, _ROUNDS_SHOWN)
        origin = spans[0][2] if spans else 0.0
        shown = [LaneSpan(lane, name, _ms(start - origin), _ms(end - origin)) for lane, name, start, end, _ in spans]
        names = {span.name: SpanKind(*WORK[span.name]) for span in shown if span.name in WORK}
        return RecentRounds(lanes_of(spans), shown, names)

    def check_name(self, name: str | None) -> None:
        if name not in (None, self.name):
            line = f"model: {name!r:.80} is not served here; it is {self.name}"
            raise ApiError(404, line, param="model", code="model_not_found")

    def truncation(self, request: CompletionRequest | ChatRequest) -> Truncation | None:
        """How the request has its prompts cut; None: not at all."""
        most = request.truncate_prompt_tokens
        if most is None:
            return None
        if most == -1:
            most = self._max_source_len or self._longest - (request.limit or 1)
        if most < 1:
            raise self._too_long(f"max_tokens: {request.limit} tokens and a prompt", "max_tokens")
        return Truncation(most, keeps_start=request.truncation_side == "right")

    def encode(
        self, text: str, *, field: str = "prompt", adds_special_tokens: bool = True, cut: Truncation | None = None
    ) -> list[int]:
        """Its tokens, or what `cut` keeps of them. Takes long for long texts, so call it off the event loop."""
        if len(text) > self._most_characters:
            raise self._too_long(f"{field}: {len(text)} characters", field)
        if not is_text(text):
            raise ApiError(400, f"{field}: {NO_TEXT}", param=field)
        if len(text) < LONG:
            encoding = self._tokenizer.encode(text, add_special_tokens=adds_special_tokens)
        else:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special_tokens)
        return encoding.ids if cut is None else cut.of_text(encoding)

    def decode(self, token_ids: Sequence[int], field: str = "prompt", *, skips_special: bool = True) -> str:
        self.check_tokens(token_ids, field)
        if len(token_ids) < LONG:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skips_special)
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skips_special)[0]

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The entries of the vocabulary."""
        return [self._tokenizer.id_to_token(token) or "" for token in token_ids]

    @cached_property
    def token_names(self) -> TokenNames:
        """Made at the first use, which reads the tokenizer again: off the event loop."""
        try:
            pieces = TokenPieces(self._checkpoint)
        except ValueError:
            pieces = None
        return TokenNames(self._tokenizer, pieces)

    def reasoning_count(self, beginning: Beginning) -> Callable[[], ReasoningCount] | None:
        """Makes counts of the tokens of reasoning in replies to a prompt; None where the model has none."""
        if not self.reasoning.exist:
            return None
        return lambda: ReasoningCount(beginning, self._tokenizer.decode)

    def encode_chat(self, text: str, cut: Truncation | None = None) -> list[int]:
        """Tokens of a chat that the template wrote, special tokens included, or what `cut` keeps of them."""
        return self.encode(text, field="messages", adds_special_tokens=False, cut=cut)

    def chat_text(self, fields: TemplateFields) -> str:
        """A chat, as the checkpoint's template writes it."""
        if self._template is None:
            where = "chat_template.jinja or tokenizer_config.json"
            line = f"messages: {self.name} has no chat template ({where}); use /v1/completions"
            raise ApiError(400, line, param="messages", code="no_chat_template")
        try:
            options = self._template_names(self._template, fields)
            if fields.offered_tools:
                options["tools"] = [tool.for_template() for tool in fields.offered_tools]
            messages = [message.for_template() for message in fields.messages or ()]
            if fields.continue_final_message:
                return self._template.render_open(messages, **options)
            return self._template.render(messages, add_generation_prompt=fields.add_generation_prompt, **options)
        except ValueError as error:
            raise bad_request(error) from error

    @staticmethod
    def _template_names(template: ChatTemplate, fields: TemplateFields) -> dict[str, Any]:
        """The further names that the template gets: those of the request, and those that stand for its effort. Raises
        ValueError, one line, if they contradict."""
        names = dict(fields.chat_template_kwargs)
        said = {} if fields.reasoning_effort is None else template.names_of_effort(fields.reasoning_effort)
        for name, value in said.items():
            if names.setdefault(name, value) != value:
                raise ValueError(f"chat_template_kwargs: {name} contradicts reasoning_effort; leave one of them out")
        return names

    def call_reader(self, request: ChatRequest, *, is_followed: bool) -> Callable[[], CallReader]:
        """Makes a reader of a reply's calls; `is_followed` says whether a grammar writes those of the model's own form.
        The first may take seconds, because it loads transformers."""
        if isinstance(request.choice, NamedTool):
            name = request.choice.function.name
            return lambda: ArgumentsReader(name)
        if request.choice == "required":
            return CallListReader
        form, tools, names = self._known_form(), request.offered_tools, request.callable_names
        return lambda: form.reader(tools, names, is_followed=is_followed)

    def native_grammar(self, request: ChatRequest, tools: Sequence[ToolDefinition]) -> Grammar | None:
        """What a reply follows that may call these tools in the model's own form; None where nothing can be
        prescribed."""
        form = self._known_form()
        return form.grammar(tools, is_parallel=request.parallel_tool_calls) if self._follows_grammars else None

    def _known_form(self) -> CallForm:
        if self._call_form is None:
            line = f"tools: {self.name} has no form of calls that this server knows; use tool_choice=required, or none"
            raise ApiError(400, line, param="tools", code="no_tools")
        return self._call_form

    def check_tokens(self, token_ids: Sequence[int], field: str) -> None:
        try:
            check_tokens(field, token_ids, self.vocab_size)
        except ValueError as error:
            raise bad_request(error) from error

    def encode_texts(self, request: GenerationRequest) -> EncodedTexts:
        """Takes long for long texts, as `encode`."""
        most = MOST_BAD_WORD_TOKENS * self._most_characters // self.max_model_len
        if (size := sum(map(len, request.bad_words))) > most:
            line = f"bad_words: has {size} characters in all; give at most {most}"
            raise ApiError(400, line, param="bad_words")
        return EncodedTexts(bad_word_tokens(self._tokenizer, request.bad_words), self._prediction_tokens(request))

    def _prediction_tokens(self, request: GenerationRequest) -> list[int]:
        """Tokens of the text that the reply may follow; none without one. Refused where no drafter would copy it."""
        if request.prediction is None:
            return []
        chosen, copying = request.speculative.chosen, self._drafter.copying_names
        if not copying or chosen not in (None, *copying):
            remedy = f"name drafter {' or '.join(copying)}" if copying else "start the server with drafter=copy"
            line = f"prediction: nothing would be drafted from it; {remedy}, or leave it out"
            raise ApiError(400, line, param="prediction", code="unsupported_field")
        return self.encode(request.prediction.text, field="prediction", adds_special_tokens=False)

    def submit(
        self,
        request: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        limit: int | None,
        field: str,
        texts: EncodedTexts,
        grammar: Grammar | None,
    ) -> list[RequestedText]:
        """Start every choice of every prompt, with at most `limit` tokens each (None: to the end of the context)."""
        if (size := len(texts.prediction)) > self._longest:
            raise self._too_long(f"prediction: {size} tokens", "prediction")
        sampling = [request.sampling(texts.bad_words, self._max_tokens(prompt, limit, field)) for prompt in prompts]
        options = request.speculative
        self._check_speculation(options)
        how: dict[str, Any] = {"drafter": options.chosen, "num_draft_tokens": options.num_draft_tokens}
        how |= {"reference": texts.prediction, "priority": request.priority, "grammar": grammar}
        how["cache_salt"], asked = request.cache_salt, request.asked_logprobs
        how["includes_stop"], how["only_prompt"] = request.include_stop_str_in_output, request.only_prompt
        how["skips_special"] = request.skip_special_tokens
        how |= {"logprobs": asked.generated, "prompt_logprobs": asked.most_of_prompt}
        choices: list[RequestedText] = []
        for prompt, params in zip(prompts, sampling, strict=True):
            for seed in request.seeds():
                completion = self._client.submit(prompt, replace(params, seed=seed), **how)
                choices.append(RequestedText(len(choices), completion, seed))
        return choices

    def _check_speculation(self, options: SpeculationOptions) -> None:
        if options.chosen not in (None, PLAIN_DECODING, *(drafters := self._client.drafters)):
            field, known = "speculative.drafter", ", ".join([*drafters, PLAIN_DECODING])
            line = f"{field}: this server has no {options.chosen!r:.40}; name one of {known}, or leave it out"
            raise ApiError(400, line, param=field)
        if (length := options.num_draft_tokens or 0) > self.num_spec_tokens:
            field = "speculative.num_draft_tokens"
            line = f"{field}: {length} is more than this server drafts ({self.num_spec_tokens})"
            raise ApiError(400, line, param=field)

    def _max_tokens(self, prompt: Sequence[int], limit: int | None, field: str) -> int:
        self.check_tokens(prompt, field)
        room = self._longest - len(prompt)
        if self._max_source_len:  # the prompt is read by the encoder and takes no room of the answer
            if len(prompt) > self._max_source_len:
                line = f"{field}: {len(prompt)} tokens do not fit the encoder's {self._max_source_len}"
                raise ApiError(400, line, param=field, code="context_length_exceeded")
            room = min(self.max_model_len, self._kv_slots - len(prompt)) - self._start_len
        if not prompt:
            raise ApiError(400, f"{field}: is empty; give at least one token", param=field)
        if room < 1:
            raise self._too_long(f"{field}: {len(prompt)} tokens", field)
        if room < (limit or 1):
            line = f"max_tokens={limit}: {field} leaves room for {room}, in a context of {self._longest} tokens"
            raise ApiError(400, line, param="max_tokens", code="context_length_exceeded")
        return room if limit is None else limit

    def _too_long(self, what: str, field: str) -> ApiError:
        line = f"{what} do not fit the context of {self._longest} tokens"
        return ApiError(400, line, param=field, code="context_length_exceeded")


def _most_characters_a_token(tokenizer: Tokenizer) -> int:
    """The length of the longest token, where tokens are bytes of the text. Composing characters, which some tokenizers
    do before, leaves more than a quarter of them."""
    drops = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    if drops or not isinstance(tokenizer.decoder, ByteLevel) or not isinstance(tokenizer.normalizer, NFC | None):
        return _MOST_CHARACTERS_A_TOKEN
    return min(_MOST_CHARACTERS_A_TOKEN, 4 * max(map(len, tokenizer.get_vocab())))


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
