"""A client of a running engine: turns prompts into tokens over one connection to its coordinator.

    with connect("tcp://10.0.0.1:6400", "run/secret") as client:   # `Engine.address` and `Engine.secret`, from anywhere
        for completion in client.generate(["def median(values):"]):
            print(completion.text)

Several clients share one engine: each receives the tokens of its own requests, and one that leaves does not disturb the
others. A client keeps every token it received, so it resumes a request at a restarted coordinator after those tokens.
It knows neither models nor processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tokenizers import Tokenizer

from actors.protocol.grammar import Grammar
from actors.protocol.membership import Alive, Hello, Ready, Stop, identity_of
from actors.protocol.messages import Abort, Outputs, Report, ReportOrder, Request, SamplingParams, Tokens
from actors.transport.channel import AnyLink, open_link
from actors.transport.keys import OUT, LinkKey
from cluster.completion import Completion, EngineError
from cluster.io.text import load_tokenizer

if TYPE_CHECKING:
    from actors.grammars.compiler import GrammarCompiler

_LEAD = "target-0"
_POLL_S = 0.2
_REFUSED_AGAIN_S = 1.5
"""A key that is not admitted is refused again within this; one that connects too often fails every two seconds."""
_RESUME_S = 5.0
"""A request without tokens for so long is sent again: it may be queued, or the record may be lost."""
_REPORT_S = 30.0
_GREET_S = 1.0
"""Seconds without a record, four heartbeats, after which the client greets the hub again."""
_SECRET = "SPECDEC_SECRET"


class RemoteTrace(Exception):
    """The traceback of an error in another process; the cause of the error that a client raises."""


class Connection:
    """Two links to the coordinator's hub, so that threads which send do not wait for the one that receives."""

    def __init__(self, address: str, name: str, key: LinkKey) -> None:
        self.address = address
        self.may_wait: Callable[[Any], bool] = lambda _: False
        """Which records need not be received at once; asked where the hub is of this process."""
        self._name = name
        self._key = key
        self._greet()
        self._sender: AnyLink | None = open_link(address, name + OUT, key)
        self._lock = threading.Lock()

    def send(self, record: Any) -> None:
        """Send from any thread; after `close` the record is dropped."""
        with self._lock:
            if self._sender is not None:
                self._sender.send(record)

    def receive(self, timeout_s: float) -> Any | None:
        """The next record, or None after `timeout_s`. Call it in a loop of one thread: it also greets a new hub."""
        if self._receiver_address != self.address:
            self._receiver.close()
            self._greet()
        record, now = self._receiver.receive(timeout_s), time.monotonic()
        if record is not None:
            self._heard_at = now
        elif now - self._heard_at > _GREET_S:
            self._heard_at = now
            self._receiver.send(Hello())
        return record

    def is_refused(self) -> bool:
        """Whether the engine does not admit this key; asked where it has not answered."""
        return self._receiver.is_refused(_POLL_S)

    def move(self, address: str) -> None:
        """Say, from any thread, that the hub is at this address now; the next `receive` follows."""
        with self._lock:
            self.address = address
            if self._sender is not None:
                self._sender.close()
                self._sender = open_link(address, self._name + OUT, self._key)

    def close(self) -> None:
        """Once no thread is in `receive`."""
        self._receiver.close()
        with self._lock:
            if self._sender is not None:
                self._sender.close()
                self._sender = None

    def _may_wait(self, record: Any) -> bool:
        return self.may_wait(record)

    def _greet(self) -> None:
        self._receiver_address, self._heard_at = self.address, time.monotonic()
        self._receiver = open_link(self._receiver_address, self._name, self._key, may_wait=self._may_wait)
        self._receiver.send(Hello())


class Client:
    """Requests and completions over one `Connection`, which a reader thread serves until `close`.

    `ready` holds what each rank measured at its start, by identity; `sampling` is that of requests without their own.
    With `silence_s`, the client fails after so many seconds without a record from the coordinator, which sends a
    heartbeat four times a second.
    """

    def __init__(
        self,
        connection: Connection,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        ready: dict[str, Ready] | None = None,
        silence_s: float = float("inf"),
    ) -> None:
        self.tokenizer = tokenizer
        self.ready = ready or {}
        self.trace = ""
        self.sampling = sampling
        self._silence_s = silence_s
        self._ids = itertools.count(1)
        self._live: dict[int, Completion] = {}
        self._error: str | None = None
        self._incarnation = 0  # of the coordinator that knows the live requests
        self._report_order: ReportOrder | None = None
        self._reports: list[Report] = []
        self._reporting = threading.Lock()  # an answer does not say which order it is to
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._connection = connection
        connection.may_wait = self._may_wait
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._reader.start()

    @property
    def address(self) -> str:
        """Address of the coordinator's hub."""
        return self._connection.address

    @cached_property
    def grammars(self) -> GrammarCompiler:
        from actors.grammars.compiler import GrammarCompiler  # most clients send none

        return GrammarCompiler(self.tokenizer.to_str)

    @property
    def drafters(self) -> list[str]:
        """Names of the engine's drafters, of which a request may choose one."""
        return self.ready[_LEAD].facts.get("drafters", [])

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        num_draft_tokens: int | None = None,
        reference: Sequence[int] = (),
        priority: int = 0,
        expected_tokens: int = 0,
        grammar: Grammar | None = None,
        cache_salt: str = "",
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        includes_stop: bool = False,
        skips_special: bool = True,
        only_prompt: bool = False,
    ) -> Completion:
        """Start one request. The completion is an async iterator of `Token`, and has a blocking `result()`. The prompt
        of an encoder-decoder is what its encoder reads.

        `drafter` names one of `drafters`, or is "none" for plain decoding; None leaves the choice to the engine.
        `num_draft_tokens` bounds every draft. `reference` are tokens of a text that the output may follow, such as the
        file that it edits: `drafter=copy` drafts from it. Of the requests of this client that wait, one of lower
        `priority` comes first; 10 s of waiting make up for 1. So does one that is longer by its `expected_tokens`, an
        estimate of what it will generate, at most its `max_tokens`; 10 ms make up for one token. The text follows
        `grammar`, which is compiled here first, if it is new. KV rows of texts that begin alike are shared between this
        client's requests with the same `cache_salt`, and so is what drafters remember of ended ones. `logprobs` asks
        for the log-probability of each generated token and of so many of the likeliest ones there, `prompt_logprobs`
        for the same at the prompt's tokens: `Completion.logprobs` and `Completion.prompt_logprobs`, log-softmax of the
        target's logits before sampling parameters and grammars apply. With `includes_stop` the stop string or
        token that ends the text belongs to it, without `skips_special` the names of special tokens do. `only_prompt`
        asks for what is known of the prompt, such as `prompt_logprobs`, and for no token.
        Raises ValueError for an invalid token, sampling parameter, name, bound or grammar, EngineError once the engine
        has failed. A prompt that does not fit the target's context is not sent: its completion has failed.
        """
        token_ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        params = sampling or self.sampling
        how: dict[str, Any] = {
            "num_draft_tokens": num_draft_tokens,
            "reference": tuple(reference),
            "priority": priority,
            "expected_tokens": expected_tokens,
            "grammar": grammar,
            "cache_salt": cache_salt,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
        }
        facts = self.ready[_LEAD].facts
        if (start := facts.get("text_start")) is not None:
            how["source"], token_ids = tuple(token_ids), start
            params = params.completed(facts["sampling"])
        if only_prompt:  # which is known once a token is, whatever that is
            params = replace(params, max_tokens=1, min_tokens=0)
        request = Request(next(self._ids), tuple(token_ids), params, drafter, **how)
        shown = {"includes_stop": includes_stop, "skips_special": skips_special, "only_prompt": only_prompt}
        completion = Completion(request, prompt, self.tokenizer, self._abort, **shown)
        if (misfit := request.misfit(int(facts["max_model_len"]), int(facts.get("max_source_len", 0)))) is not None:
            completion.fail(misfit)
            return completion
        if facts.get("block_size") and (misfit := request.block_misfit()) is not None:
            raise ValueError(misfit)
        request.check(int(facts["vocab_size"]), drafters=self.drafters)
        if grammar is not None:
            self.grammars.matcher(grammar)
        with self._changed:
            self.check_alive()
            self._live[completion.request_id] = completion
        self._connection.send(request)
        return completion

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        num_draft_tokens: int | None = None,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        on_finished: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Completions of all prompts, each as of `submit`; `on_finished` is called with each, in order.

        Raises the EngineError of the first that failed, once the others have ended too, and ValueError for one text in
        place of several.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts={prompts!r:.40}: is one text; give a list of them")
        options: dict[str, Any] = {"drafter": drafter, "num_draft_tokens": num_draft_tokens, "grammar": grammar}
        options |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        completions = [self.submit(prompt, sampling, **options) for prompt in prompts]
        failure: EngineError | None = None
        for completion in completions:
            try:
                completion.result()
            except EngineError as error:
                failure = failure or error
            else:
                if on_finished is not None:
                    on_finished(completion)
        if failure is not None:
            raise failure
        return completions

    def report(self, *, reset: bool = False, phase: str = "", spans: bool = True) -> Report:
        """The coordinator's counters since the last reset, those of all clients together; for the owner spans too.

        `reset` starts a new window for everyone, and metrics label what follows it with `phase`: the owner's right,
        which other clients ask for without effect. Without `spans` the report is small.
        """
        order = ReportOrder(reset, phase, spans)
        with self._reporting:
            return self._report(order)

    def _report(self, order: ReportOrder) -> Report:
        with self._changed:
            self.check_alive()
            self._reports.clear()
            self._report_order = order
        self._connection.send(order)
        with self._changed:
            self._changed.wait_for(lambda: self._reports or self._error is not None, timeout=_REPORT_S)
            self._report_order = None
            if not self._reports:
                self.check_alive()
                raise EngineError("the coordinator does not answer")
            return self._reports.pop()

    def close(self) -> None:
        """Disconnect; requests in flight are aborted and end with an error. Safe to call twice."""
        if self._stopped.is_set():
            return
        self._stop_reader()
        for request_id in list(self._live):
            self._abort(request_id)
        self._connection.close()
        self._fail("the client was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _stop_reader(self) -> None:
        self._stopped.set()
        self._reader.join()

    def check_alive(self) -> None:
        """Raise EngineError once the engine has failed."""
        if self._error is not None:
            raise EngineError(self._error) from (RemoteTrace(self.trace) if self.trace else None)

    def _abort(self, request_id: int) -> None:
        self._connection.send(Abort(request_id))

    def _fail(self, reason: str, trace: str = "") -> None:
        """End every live request with the first such reason; later requests raise it."""
        with self._changed:
            if self._error is None:
                self._error, self.trace = reason, trace
            failed, self._live = list(self._live.values()), {}
            self._changed.notify_all()
        for completion in failed:
            completion.fail(self._error)

    # --- the reader thread --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        received_at = checked_at = time.monotonic()
        try:
            while not self._stopped.is_set():
                record = self._connection.receive(_POLL_S)
                now = time.monotonic()
                if isinstance(record, Stop):
                    self._fail(record.reason)
                    return
                if record is not None:
                    received_at = now
                    self._on_record(record)
                elif now - received_at > self._silence_s:
                    self._fail(f"{self.address}: no heartbeat of the engine for {now - received_at:.0f} s")
                    return
                if now - checked_at > _RESUME_S / 5:
                    checked_at = now
                    self._resume(unchanged_since=now - _RESUME_S)
        except Exception as error:
            self._fail(f"engine: {type(error).__name__}: {error}")
            raise

    def _on_record(self, record: Any) -> None:
        match record:
            case Outputs():
                for tokens in record.tokens:
                    self._on_tokens(tokens)
            case Report():
                with self._changed:
                    self._reports.append(record)
                    self._changed.notify_all()
            case Ready():
                with self._changed:
                    self.ready[record.identity] = record
                    self._changed.notify_all()
            case Alive():
                self._on_heartbeat(record)

    def _may_wait(self, record: Any) -> bool:
        """Whether it has tokens alone, and they are not waited for."""
        if not isinstance(record, Outputs):
            return False
        for tokens in record.tokens:
            completion = self._live.get(tokens.request_id)
            if completion is None or tokens.finish_reason is not None or not completion.may_wait:
                return False
        return True

    def _on_tokens(self, tokens: Tokens) -> None:
        completion = self._live.get(tokens.request_id)
        if completion is not None and completion.has_gap(tokens):
            self._connection.send(completion.remaining_request())
        elif completion is not None and completion.append(tokens):
            with self._changed:
                self._live.pop(tokens.request_id, None)

    def _on_heartbeat(self, alive: Alive) -> None:
        """A successor of the coordinator knows no request: greet it, and send all of them once it serves."""
        if alive.incarnation <= self._incarnation:
            return
        if alive.waiting:
            self._connection.send(Hello())
            return
        self._incarnation = alive.incarnation
        self._on_successor()

    def _on_successor(self) -> None:
        """Another coordinator serves, which knows nothing that the one before was sent."""
        self._resume()
        if (order := self._report_order) is not None:
            self._connection.send(order)

    def _resume(self, unchanged_since: float = float("inf")) -> None:
        """Send again what has received nothing since then, to go on after the tokens that arrived."""
        for completion in list(self._live.values()):
            if completion.updated_at < unchanged_since:
                self._connection.send(completion.remaining_request())
                if completion.is_aborted:
                    self._abort(completion.request_id)


def connect(
    address: str,
    secret: str | Path | None = None,
    *,
    sampling: SamplingParams | None = None,
    checkpoint: Path | None = None,
    timeout_s: float = 30.0,
) -> Client:
    """A client of the engine whose coordinator listens at `address` (`Engine.address`), ready to `submit`.

    `secret` is the key of a client, such as `Engine.secret`, or the path of the file that holds it, by default what
    SPECDEC_SECRET says. Raises ValueError if there is none.
    The tokenizer is read from the target's checkpoint: `checkpoint`, or the path where the target itself found it.
    `sampling` replaces the defaults of `SamplingParams` for requests without their own. Raises EngineError if no engine
    answers within `timeout_s`; the client fails in the same way after so long without a heartbeat.
    """
    key = _read_key(secret)
    connection = Connection(address, f"{key.peer}:{secrets.token_hex(8)}", key)
    try:
        ready = _first_ready(connection, timeout_s)
        tokenizer = load_tokenizer(checkpoint or Path(str(ready.facts["checkpoint"])))
    except BaseException:
        connection.close()
        raise
    return Client(connection, tokenizer, sampling or SamplingParams(), ready={_LEAD: ready}, silence_s=timeout_s)


def _first_ready(connection: Connection, timeout_s: float) -> Ready:
    """What the lead of the target measured at its start."""
    deadline, refused_at = time.monotonic() + timeout_s, float("-inf")
    while (left_s := deadline - time.monotonic()) > 0:
        record = connection.receive(min(left_s, _POLL_S))
        if isinstance(record, Ready) and identity_of(record.role, record.rank) == _LEAD:
            return record
        if record is None and connection.is_refused():
            if time.monotonic() - refused_at < _REFUSED_AGAIN_S:
                raise EngineError(f"{connection.address}: the engine there does not admit this key; see {_SECRET}")
            refused_at = time.monotonic()
    raise EngineError(f"{connection.address}: no engine answered within {timeout_s:.0f} s")


def _read_key(given: str | Path | None) -> LinkKey:
    text = str(given or os.environ.get(_SECRET, ""))
    try:
        with contextlib.suppress(ValueError):
            return LinkKey.read(text)
        return LinkKey.read(Path(text).read_text())
    except (OSError, ValueError) as error:
        remedy = "give the file that the engine or `python -m cluster.keys` wrote, or its content"
        raise ValueError(f"{_SECRET}: no key of a client there ({type(error).__name__}); {remedy}") from error
