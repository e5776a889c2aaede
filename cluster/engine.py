"""The public Python API: an engine that turns prompts into tokens.

    with Engine(load_config(["drafter=ngram", "cluster=inprocess"])) as engine:
        for completion in engine.generate(["def median(values):"]):
            print(completion.text)
        async for token in engine.submit("class Stack:"):   # inside a coroutine
            print(token.text, end="")

It owns the tokenizer, the backend and one link to the coordinator. It knows neither models nor rounds. Everything a
client was told is kept here: whatever dies, the coordinator too, a request is asked for again behind the tokens it has
got, and ends with the tokens it would have had or, when too much has died, with a clear error.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from actors.coordinator.clients import CLIENT, OUT
from actors.protocol.membership import Alive, Hello, Ready, Silent, Stop, identity_of
from actors.protocol.messages import Abort, Report, ReportOrder, Request, SamplingParams, Tokens
from actors.transport.channel import Link
from cluster.completion import Completion, EngineError
from cluster.config.schema import LaunchConfig, load_config
from cluster.io.text import check_same_vocabulary, load_tokenizer, read_eos_token_ids
from cluster.observability.startup_time import StartUp
from cluster.placement.memory import describe_layout, footprints
from cluster.placement.ranks import RankPlacement
from cluster.runtime.backend import make_backend
from cluster.runtime.specs import coordinator_spec
from cluster.runtime.supervisor import Supervisor

__all__ = ["Completion", "Engine", "EngineError"]

_POLL_S = 0.2
_ASK_AGAIN_S = 5.0
"""A request without news for so long is asked for again: it may be waiting its turn, or have been lost on the way."""
_CLOSED = "the engine was closed"


class RemoteTrace(Exception):
    """Where in another process it happened; the cause of the error that a client sees."""


class Engine:
    """Starts on construction and is ready when the constructor returns; `close` (or `with`) ends it.

    Its roles log to `log_dir`, where one is given and their hosts can write it.
    """

    def __init__(
        self,
        config: LaunchConfig | None = None,
        *,
        progress: Callable[[str], None] | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self.config = config if config is not None else load_config([])
        self.startup = StartUp()
        self.startup.mark("imports")
        checkpoint = Path(self.config.target.path)
        self.tokenizer = load_tokenizer(checkpoint)
        for path in self.config.drafter.models():
            check_same_vocabulary(checkpoint, Path(path))
        self.ready: dict[str, Ready] = {}
        self._ids = itertools.count(1)
        self._live: dict[int, Completion] = {}
        self._error: str | None = None
        self.trace = ""
        self._generation = 0  # incarnation of the coordinator that knows the live requests
        self._report_order: ReportOrder | None = None
        self._reports: list[Report] = []
        self._news = threading.Condition()
        self._send_lock = threading.Lock()
        self._closed = False
        self._stopped = threading.Event()
        self._last_call: threading.Timer | None = None
        self._reader: threading.Thread | None = None
        self._out: Link | None = None
        self._backend = make_backend(self.config, log_dir)
        self.supervisor = Supervisor(
            self._backend,
            self.config.cluster,
            on_lost=self._send,
            on_moved=self._reach,
            on_final=self._fail,
        )
        try:
            self._start(read_eos_token_ids(checkpoint), progress or (lambda stage: None))
        except BaseException:
            self.close()
            raise

    # --- asking -------------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, *, speculate: bool = True
    ) -> Completion:
        """Start one request. The completion is an async iterator of `Token`, and has a blocking `result()`.

        Raises ValueError for a prompt or sampling parameters that make no sense, EngineError once the engine is dead.
        """
        sampling = sampling if sampling is not None else self.config.sampling_params(self.tokenizer)
        token_ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        request = Request(next(self._ids), tuple(token_ids), sampling, speculate)
        request.check(int(self.ready["target-0"].facts["vocab_size"]))
        completion = Completion(request, prompt, self.tokenizer, self._abort)
        with self._news:
            self._check_alive()
            self._live[completion.request_id] = completion
        self._send(request)
        return completion

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        speculate: bool = True,
        on_finished: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Completions of all prompts; `on_finished` hears of them in order.

        Raises the EngineError of the first that failed, once the others have ended too.
        """
        completions = [self.submit(prompt, sampling, speculate=speculate) for prompt in prompts]
        failures: list[EngineError] = []
        for completion in completions:
            try:
                completion.result()
            except EngineError as error:
                failures.append(error)
                continue
            if on_finished is not None:
                on_finished(completion)
        if failures:
            raise failures[0]
        return completions

    def report(self, *, reset: bool = False, phase: str = "") -> Report:
        """The coordinator's counters and spans since the last reset; metrics label what follows a reset by `phase`."""
        with self._news:
            self._check_alive()
            self._reports.clear()
            self._report_order = ReportOrder(reset, phase)
        self._send(self._report_order)
        with self._news:
            self._news.wait_for(lambda: self._reports or self._error is not None, timeout=30)
            self._report_order = None
            if not self._reports:
                self._check_alive()
                raise EngineError("the coordinator does not answer")
            return self._reports.pop()

    @property
    def places(self) -> list[RankPlacement]:
        """Where each rank is; those whose node was lost move."""
        return self._backend.places

    def pids(self) -> dict[str, int]:
        """Process ids of the coordinator and the ranks, by identity, as far as they are known and ready."""
        ranks = {identity: int(ready.facts["pid"]) for identity, ready in self.ready.items()}
        return self.supervisor.coordinator_pid() | ranks

    def publish(self, file: Path) -> None:
        """Let the dashboard of a cluster that outlives this engine offer a copy of `file` on its Logs page."""
        self._backend.publish(file)

    # --- life ---------------------------------------------------------------------------------------------------------

    def wind_down(self, within_s: float = 3.0) -> None:
        """Wait no longer than this for what still runs: then it fails, and nobody who dies is replaced from now on.

        For an end that may take the rest of the cluster with it, as a batch system's does.
        """
        self.supervisor.end_replacing()
        self._last_call = threading.Timer(within_s, self._fail, ("the engine is ending",))
        self._last_call.daemon = True
        self._last_call.start()

    def close(self) -> None:
        """End the engine; requests in flight end with an error. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._last_call is not None:
            self._last_call.cancel()
        self.supervisor.stop()
        self._send(Stop(_CLOSED))
        told = False
        if self._reader is not None:
            self._reader.join(timeout=0 if self._error is not None else 5)
            told = not self._reader.is_alive()
            self._stopped.set()
            self._reader.join()
        self._backend.close(told=told)
        with self._send_lock:
            if self._out is not None:
                self._out.close()
                self._out = None
        self._fail(_CLOSED)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, eos_token_ids: tuple[int, ...], progress: Callable[[str], None]) -> None:
        config = self.config
        progress("reaching the cluster")
        places = self._backend.place(progress)
        self.startup.mark("cluster")
        spec = coordinator_spec(config, places, eos_token_ids)
        progress(describe_layout(places, footprints(config, places)))
        progress("starting " + ", ".join(place.identity for place in places))
        address = self._backend.start(spec, places, eos_token_ids)
        self.startup.mark("processes")
        self._out = Link(address, f"{CLIENT}{OUT}")
        self._reader = threading.Thread(target=self._read, args=(address,), name="engine-reader", daemon=True)
        self._reader.start()
        self.supervisor.start()
        deadline = time.monotonic() + config.cluster.startup_timeout_s
        with self._news:
            while len(self.ready) < len(places) and self._error is None:
                if time.monotonic() > deadline:
                    missing = [place.identity for place in places if place.identity not in self.ready]
                    raise EngineError(
                        f"cluster.startup_timeout_s: {', '.join(missing)} not ready after "
                        f"{config.cluster.startup_timeout_s} s; raise it or look at the actors' logs"
                    )
                self._news.wait(timeout=_POLL_S)
                progress(f"loading ({len(self.ready)} of {len(places)} ranks)")
            self._check_alive()
        self.startup.mark("loading")
        self.supervisor.begin_replacing({identity: ready.facts for identity, ready in self.ready.items()})

    # --- the coordinator's side ---------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineError(self._error) from (RemoteTrace(self.trace) if self.trace else None)

    def _send(self, record: Any) -> None:
        """Lost once the engine is closed, like a record to a role that died: whoever waits was told."""
        with self._send_lock:
            if self._out is not None:
                self._out.send(record)

    def _reach(self, address: str) -> None:
        """The coordinator's hub is at this address now; the reader follows when it looks."""
        with self._send_lock:
            if self._out is not None:
                self._out.close()
            self._out = Link(address, f"{CLIENT}{OUT}")

    def _abort(self, request_id: int) -> None:
        self._send(Abort(request_id))

    def _read(self, address: str) -> None:
        """The reader thread: records from the coordinator, and a look at who was not heard of while it is silent."""
        link = Link(address, CLIENT)
        link.send(Hello())
        looked_at = time.monotonic()
        try:
            while not self._stopped.is_set():
                if address != self._backend.address:
                    link.close()
                    address = self._backend.address
                    link = Link(address, CLIENT)
                    link.send(Hello())
                record = link.receive(timeout_s=_POLL_S)
                if isinstance(record, Stop):
                    self._fail(record.reason)
                    return
                if record is not None:
                    self._take(record)
                with self._send_lock:  # what could not go out at once goes out when somebody looks
                    if self._out is not None and self._out.is_waiting:
                        self._out.receive(timeout_s=0)
                if time.monotonic() - looked_at > _ASK_AGAIN_S / 5:
                    looked_at = time.monotonic()
                    self._ask_again(lambda completion: looked_at - completion.heard_at > _ASK_AGAIN_S)
        except Exception as error:
            self._fail(f"engine: {type(error).__name__}: {error}")
            raise
        finally:
            link.close()

    def _take(self, record: Any) -> None:
        match record:
            case Tokens():
                completion = self._live.get(record.request_id)
                if completion is not None and completion.misses(record):
                    self._send(completion.ask_again())
                elif completion is not None and completion.take(record):
                    with self._news:
                        self._live.pop(record.request_id, None)
            case Report():
                with self._news:
                    self._reports.append(record)
                    self._news.notify_all()
            case Ready():
                identity = identity_of(record.role, record.rank)
                self.supervisor.hear_ready(record)
                with self._news:
                    self.ready[identity] = record
                    self._news.notify_all()
            case Alive():
                self._meet_coordinator(record)
            case Silent():
                self.supervisor.hear_silence(record)

    def _meet_coordinator(self, alive: Alive) -> None:
        """A successor of the coordinator knows nothing: greet it, and ask for everything again once it serves."""
        if alive.incarnation < self._generation:
            return
        self.supervisor.hear_coordinator(alive)
        if alive.incarnation == self._generation:
            return
        if alive.waiting:
            self._send(Hello())
            return
        self._generation = alive.incarnation
        self._ask_again(lambda completion: True)
        if (order := self._report_order) is not None:
            self._send(order)

    def _ask_again(self, needed: Callable[[Completion], bool]) -> None:
        for completion in list(self._live.values()):
            if needed(completion):
                self._send(completion.ask_again())
                if completion.is_aborted:
                    self._abort(completion.request_id)

    def _fail(self, reason: str, trace: str = "") -> None:
        with self._news:
            if self._error is None:
                self._error, self.trace = reason, trace
            orphans, self._live = list(self._live.values()), {}
            self._news.notify_all()
        for completion in orphans:
            completion.fail(self._error)
