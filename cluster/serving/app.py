"""The API over one client of an engine: the routes of a FastAPI application, and its beginning and end.

What turns text into tokens or back runs in threads, so that a long text does not hold up the streams of others.
It must not know sockets or how the engine was started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from msgspec import UNSET, Struct
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from actors.protocol.grammar import Grammar
from cluster.completion import EngineError
from cluster.config.schema import LaunchConfig
from cluster.engine import Client
from cluster.observability.report import versions
from cluster.serving.admission import InFlightLimit
from cluster.serving.bodies import BodyReader
from cluster.serving.document import REFUSALS, ApiDocument
from cluster.serving.errors import ApiError, Disconnected, answer_refusal, bad_request, timed_out
from cluster.serving.generation import Generation, RequestedText
from cluster.serving.grammar_check import GrammarCheck
from cluster.serving.guard import OPEN, Guard, open_to_pages
from cluster.serving.logprobs import LogprobWriter
from cluster.serving.message_parts import PartReader, PartsForm
from cluster.serving.reasoning import Beginning, ReasoningCount, ReasoningReader
from cluster.serving.replies import DONE, ChatForm, CompletionForm, ReplyForm, ReplyWriter, usage_of
from cluster.serving.reply_records import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    ModelEntry,
    ModelList,
    RecentRounds,
    TokenizeReply,
    VersionReply,
)
from cluster.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from cluster.serving.served_model import LONG, NO_TEXTS, ServedModel
from cluster.serving.streams import EventStream, while_connected
from cluster.serving.tools import NamedTool
from cluster.serving.tracing import RequestTracer

if TYPE_CHECKING:
    from opentelemetry.trace import Span

T = TypeVar("T")

_SCORED = 32
"""Characters that take as long to read as a token's log-probabilities take to write: 0.15 ms for 20 of them."""
_WARM_UP_S = 600.0
_END_S = 5.0
"""Seconds in which errors reach their clients."""
_PAGE = Path(__file__).with_name("page.html")
_PAGE_MAY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
"""It has all it needs in itself, and asks this server alone."""


class _PlainRoute(APIRoute):
    """A route whose function is given the request: FastAPI need not look for what else it wants."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint if self.methods == {"POST"} else super().get_route_handler()


class HttpService:
    """Answers the requests. `application` is the ASGI application; it answers /ready once `warm_up` has returned, and
    all but /health and the page ask for one of the `keys`, if there are any."""

    def __init__(self, client: Client, config: LaunchConfig, keys: Sequence[str] = ()) -> None:
        server = config.server
        self._model = model = ServedModel(client, config)
        self.model_name = model.name
        self._limit = InFlightLimit(config.scheduler.max_num_seqs + server.max_waiting, server.max_queue_s)
        self._tracer = RequestTracer(server.traces_endpoint, model.name)
        self._bodies = BodyReader(2 * model.max_model_len)
        self._grammars = GrammarCheck(model)
        self._timeout_s = server.timeout_s
        self._running = set[Generation]()
        self._scraping = asyncio.Lock()  # a client asks for one report at a time
        self._is_ready = False
        self.application = self._make_application(keys, int(server.max_body_mb * 2**20), server.cors_origins)

    @property
    def num_in_flight(self) -> int:
        """Completions that run or wait."""
        return self._limit.num

    def warm_up(self) -> None:
        """Generate a token; raises EngineError if that fails."""
        self._model.generate_token(_WARM_UP_S)
        self._is_ready = True

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those in flight; whether all ended in time. Others end with an error."""
        in_time = self._limit.drain(timeout_s)
        if not in_time:
            for generation in list(self._running):
                generation.fail("the server shut down before the reply had ended (server.drain_s)")
            self._limit.drain(_END_S)
        return in_time

    def close(self) -> None:
        """Send the spans that were not sent yet."""
        self._tracer.close()

    def _make_application(self, keys: Collection[str], max_body: int, cors_origins: Sequence[str]) -> ASGIApp:
        """All of it, which pages of `cors_origins` may use in browsers."""
        version, document = str(versions()["specdec"]), ApiDocument()
        app = FastAPI(
            title="specdec",
            version=version,
            responses=REFUSALS,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # `Guard` takes both; a client that is redirected may leave its body behind
        )
        for error in (HTTPException, Disconnected, EngineError, Exception):
            app.add_exception_handler(error, answer_refusal)
        app.router.route_class = _PlainRoute
        says = document.route
        app.post("/v1/completions", **says(CompletionReply, CompletionRequest, CompletionReply))(self.complete)
        app.post("/v1/chat/completions", **says(ChatReply, ChatRequest, ChatChunk))(self.chat)
        app.post("/tokenize", **says(TokenizeReply, TokenizeRequest))(self.tokenize)
        app.post("/detokenize", **says(DetokenizeReply, DetokenizeRequest))(self.detokenize)
        app.get("/v1/models", **says(ModelList))(self.models)
        app.get("/v1/models/{name:path}", **says(ModelEntry))(self.one_model)
        app.get("/health", response_class=Response)(self.health)
        app.get("/ready", response_class=Response)(self.ready)
        app.get("/version", **says(VersionReply))(self.version)
        app.get("/", response_class=HTMLResponse)(self.page)
        app.get("/metrics", response_class=PlainTextResponse)(self.metrics)
        app.get("/timeline", **says(RecentRounds))(self.timeline)
        document.complete(app, asks_for_key=bool(keys), open_paths=OPEN)
        for route in app.routes:
            if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
                route.methods.add("HEAD")  # uvicorn sends no body then
        return open_to_pages(Guard(app, keys, max_body), cors_origins)

    async def complete(self, request: Request) -> Response:
        body = await self._bodies.read(request, CompletionRequest)
        span = self._tracer.start("text_completion", request.headers, request.state.request_id)
        self._model.check_name(body.model)
        self._limit.check_size(len(body.prompts) * body.n)
        size = sum(map(len, body.prompts))
        prompts = await _apart(size, lambda: [self._prompt_tokens(prompt, body) for prompt in body.prompts])
        texts = await _apart(size, self._prompt_texts, prompts, body) if body.echo else []
        await self._grammars.check(body.grammar, body.grammar_field)
        generation = await self._submit(body, prompts, "prompt", body.grammar, span)
        echoes = {choice.index: texts[choice.index // body.n] for choice in generation.choices if body.echo}
        return await self._answer(body, request, generation, CompletionForm(echoes))

    async def chat(self, request: Request) -> Response:
        body = await self._bodies.read(request, ChatRequest)
        span = self._tracer.start("chat", request.headers, request.state.request_id)
        self._model.check_name(body.model)
        text, prompt = await asyncio.to_thread(self._chat_prompt, body)
        beginning = self._model.reasoning.beginning(text, body.continued)
        if body.may_call:
            grammar = await self._grammars.of_own_calls(body, beginning)
        else:
            grammar = self._model.reasoning.grammar(body.grammar, beginning)
            await self._grammars.check(grammar, body.grammar_field)
        form = await self._chat_form(body, beginning, is_followed=grammar is not None)
        counts = self._model.reasoning_count(beginning)
        generation = await self._submit(body, [prompt], "messages", grammar, span, counts)
        return await self._answer(body, request, generation, form)

    async def tokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, TokenizeRequest)
        self._model.check_name(body.model)
        if body.prompt is not None:
            text, adds = body.prompt, body.add_special_tokens
            tokens = await asyncio.to_thread(self._model.encode, text, adds_special_tokens=adds)
        else:
            text = await asyncio.to_thread(self._model.chat_text, body)
            tokens = await asyncio.to_thread(self._model.encode_chat, text)
        names = await asyncio.to_thread(self._model.token_texts, tokens) if body.return_token_strs else None
        return _json(TokenizeReply(len(tokens), self._model.max_model_len, tokens, names))

    async def detokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, DetokenizeRequest)
        self._model.check_name(body.model)
        decode = self._model.decode
        return _json(DetokenizeReply(await asyncio.to_thread(decode, body.tokens, "tokens", skips_special=False)))

    async def models(self) -> Response:
        return _json(ModelList([self._entry()]))

    async def one_model(self, name: str) -> Response:
        self._model.check_name(name)
        return _json(self._entry())

    def _entry(self) -> ModelEntry:
        return ModelEntry(self._model.name, self._model.created, self._model.max_model_len)

    async def health(self) -> Response:
        """200 while the engine lives."""
        try:
            self._model.check_alive()
        except EngineError as error:
            raise ApiError(503, str(error), code="engine_error") from error
        return Response()

    async def ready(self) -> Response:
        """200 once a token was generated, and until the server shuts down."""
        await self.health()
        if not self._is_ready or self._limit.is_draining:
            raise ApiError(503, "the server is shutting down" if self._is_ready else "no token was generated yet")
        return Response()

    async def version(self) -> Response:
        return _json(VersionReply(versions()["specdec"]))

    async def page(self) -> Response:
        """A page that asks this server and shows who proposed each token."""
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": _PAGE_MAY})

    async def metrics(self) -> Response:
        """The metrics, for Prometheus."""
        async with self._scraping:
            return Response(await asyncio.to_thread(self._model.metrics), media_type=CONTENT_TYPE_LATEST)

    async def timeline(self) -> Response:
        """What target and drafter did in the latest rounds, for the page."""
        async with self._scraping:
            return _json(await asyncio.to_thread(self._model.timeline))

    # --- what completions and chats have in common --------------------------------------------------------------------

    def _chat_prompt(self, body: ChatRequest) -> tuple[str, list[int]]:
        """A chat as text and as tokens."""
        text = self._model.chat_text(body)
        return text, self._model.encode_chat(text, self._model.truncation(body))

    def _prompt_tokens(self, prompt: str | list[int], body: CompletionRequest) -> list[int]:
        cut = self._model.truncation(body)
        if not isinstance(prompt, str):
            return prompt if cut is None else cut.of_tokens(prompt)
        return self._model.encode(prompt, adds_special_tokens=body.add_special_tokens, cut=cut)

    def _prompt_texts(self, prompts: Sequence[list[int]], body: CompletionRequest) -> list[str]:
        """The prompts as `echo` has them: as they came, or what was kept of them."""
        return [
            given
            if isinstance(given, str) and body.truncate_prompt_tokens is None
            else self._model.decode(tokens, skips_special=body.skip_special_tokens)
            for given, tokens in zip(body.prompts, prompts, strict=True)
        ]

    async def _chat_form(self, body: ChatRequest, beginning: Beginning, *, is_followed: bool) -> ChatForm:
        """The form of the replies; with reasoning or tools, whose calls are looked for. `is_followed`: replies have a
        grammar."""
        shows = body.include_reasoning
        if not body.offered_tools:
            if beginning is Beginning.after:
                return ChatForm()
            return PartsForm(make_reader=lambda: PartReader(ReasoningReader(beginning)), includes_reasoning=shows)
        make_calls = self._model.call_reader(body, is_followed=is_followed)
        try:
            await asyncio.to_thread(make_calls)
        except ValueError as error:
            raise bad_request(error) from error
        return PartsForm(
            make_reader=lambda: PartReader(ReasoningReader(beginning), make_calls()),
            end_reason="stop" if isinstance(body.choice, NamedTool) else "tool_calls",
            most_calls=None if body.parallel_tool_calls else 1,
            includes_reasoning=shows,
        )

    async def _submit(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[Sequence[int]],
        field: str,
        grammar: Grammar | None,
        span: Span | None,
        count_reasoning: Callable[[], ReasoningCount] | None = None,
    ) -> Generation:
        """Send the request to the engine, if there is place for all of it."""
        num = len(prompts) * body.n
        if not num:
            raise ApiError(400, f"{field}: is empty; give at least one", param=field)
        texts = NO_TEXTS
        if body.bad_words or body.prediction is not None:
            texts = await asyncio.to_thread(self._model.encode_texts, body)
        self._limit.enter(num)
        try:
            choices = self._model.submit(body, prompts, body.limit, field, texts, grammar)
        except BaseException as error:
            self._limit.leave(num, num_waiting=num)
            if isinstance(error, ValueError):
                raise bad_request(error) from error
            raise
        size, began = sum(map(len, prompts)), self._limit.began
        generation = Generation(
            choices,
            size,
            began,
            lambda: self._end(generation, span),
            texts.prediction,
            count_reasoning,
            of_parts=body.stream,
        )
        self._running.add(generation)
        return generation

    def _end(self, generation: Generation, span: Span | None) -> None:
        self._running.discard(generation)
        self._limit.leave(len(generation.choices), num_waiting=generation.num_waiting)
        for choice in generation.choices:
            self._model.histograms.observe(choice.completion)
        self._tracer.end(span, generation)

    async def _answer(
        self, body: GenerationRequest, request: Request, generation: Generation, form: ReplyForm
    ) -> Response:
        logprobs = None
        if body.asked_logprobs.asks:
            logprobs = LogprobWriter(body.asked_logprobs, await asyncio.to_thread(lambda: self._model.token_names))
        facts = self._model.name, request.state.request_id, self._model.num_spec_tokens, self._model.weight_names
        asked = {"includes_proposers": body.includes_proposers, "includes_tokens": body.return_token_ids}
        writer = ReplyWriter(form, *facts, logprobs, **asked)
        if body.stream:
            return EventStream(_events(body, generation, writer), generation.close, self._timeout_s)
        try:
            await while_connected(request.receive, self._finish(generation))
            scored = sum([_num_scored(choice, choice.completion.logprobs) for choice in generation.choices])
            content = await _apart(_SCORED * scored, writer.whole, generation)
        except TimeoutError:
            raise timed_out(self._timeout_s) from None
        finally:
            generation.close()
        return Response(content, media_type="application/json")

    async def _finish(self, generation: Generation) -> None:
        async with asyncio.timeout(self._timeout_s):
            while gained := await generation.gained():
                for index, piece in gained:
                    generation.take(index, piece)


async def _events(body: GenerationRequest, generation: Generation, writer: ReplyWriter) -> AsyncGenerator[bytes]:
    """The chunks of a stream, as many as there are at a time; a choice opens with its first piece, whose weights are
    known by then."""
    absent = None if body.includes_usage else UNSET
    opened = set[int]()
    while gained := await generation.gained():
        events = list[bytes]()
        for index, piece in gained:
            choice = generation.take(index, piece)
            if index not in opened:
                opened.add(index)
                before = usage_of(generation, (choice, piece)) if body.usage_everywhere else absent
                events.append(writer.opening(choice, piece, before))
            usage = usage_of(generation) if body.usage_everywhere else absent
            scored = _num_scored(choice, piece.logprobs, is_first=not piece.position)
            events.append(await _apart(_SCORED * scored, writer.chunk, choice, piece, usage))
        yield b"".join(events)
    if body.includes_usage:
        yield writer.closing(generation)
    yield DONE


def _num_scored(choice: RequestedText, logprobs: Sequence[object] | None, *, is_first: bool = True) -> int:
    """Tokens whose log-probabilities are known: those given, and of the prompt where they come first."""
    of_prompt = choice.completion.prompt_logprobs if is_first else None
    return len(logprobs or ()) + len(of_prompt or ())


async def _apart(size: int, work: Callable[..., T], *args: Any, **options: Any) -> T:
    """The result of work on texts or tokens of this size in all, in a thread if they are long: it takes longer than a
    thread takes to begin, and the tokenizer lets no other thread run while it reads short ones."""
    return work(*args, **options) if size < LONG else await asyncio.to_thread(work, *args, **options)


def _json(content: Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
