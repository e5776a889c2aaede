"""The drill: a load that never rests, faults one after the other, and the clock on how soon each is got over.

Every request that runs meanwhile must end with the tokens of plain decoding, which the same engine gave before the
first fault. Knows an engine from outside: its processes, their ids, and what its clients see. This machine only.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.messages import SamplingParams
from cluster.completion import Completion, EngineError
from cluster.drilling.config import DrillConfig
from cluster.engine import Engine
from cluster.prompts import Prompt

_POLL_S = 0.005
_LIMIT_S = 90.0
"""A fault that is not got over by then never will be."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to whom, and the seconds from then on until others noticed (`noticed_s`), until clients got tokens
    again (`stalled_s`) and until a successor had taken the place of the process (`replaced_s`)."""

    identity: str
    signal: str
    noticed_s: float
    stalled_s: float
    replaced_s: float

    @property
    def kind(self) -> str:
        return self.identity.partition("-")[0]


@dataclass(slots=True)
class Load:
    """Requests that ended while the faults went on; `unequal` did so with other tokens, `failed` with an error."""

    num_requests: int = 0
    num_tokens: int = 0
    unequal: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Drill:
    """One run over an engine that is up; `expected` are the tokens of plain decoding, prompt by prompt."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], sampling: SamplingParams, expected: Sequence[Sequence[int]]
    ) -> None:
        self.engine = engine
        self._prompts = prompts
        self._sampling = sampling
        self._expected = [list(token_ids) for token_ids in expected]
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._turn = 0
        self._live: dict[int, Completion] = {}
        self.load = Load()
        self.faults: list[Fault] = []

    def run(self, job: DrillConfig, on_fault: Callable[[Fault], None] = lambda fault: None) -> None:
        """All faults, one after the other; then what is in flight ends. Raises EngineError if one is not got over."""
        choose = random.Random(job.seed)
        clients = [threading.Thread(target=self._ask, name=f"client-{i}") for i in range(job.concurrency)]
        for client in clients:
            client.start()
        try:
            for identity, name in plan_faults(sorted(self.engine.pids()), job.signals, job.faults, choose):
                time.sleep(choose.uniform(0, 2 * job.spacing_s))
                self.faults.append(self._inflict(identity, name))
                on_fault(self.faults[-1])
        finally:
            self._over.set()
            for client in clients:
                client.join()

    def _ask(self) -> None:
        """A client: one request after the other."""
        while not self._over.is_set():
            with self._lock:
                index, self._turn = self._turn % len(self._prompts), self._turn + 1
            try:
                completion = self.engine.submit(self._prompts[index].content, self._sampling)
                with self._lock:
                    self._live[completion.request_id] = completion
                token_ids = completion.result().token_ids
            except EngineError as error:
                with self._lock:
                    self.load.failed.append(str(error))
                return
            with self._lock:
                del self._live[completion.request_id]
                self.load.num_requests += 1
                self.load.num_tokens += len(token_ids)
                if token_ids != self._expected[index]:
                    self.load.unequal.append(index)

    def _inflict(self, identity: str, name: str) -> Fault:
        incidents = self.engine.supervisor.incidents
        known, pid = len(incidents), self.engine.pids()[identity]
        started = time.monotonic()
        os.kill(pid, getattr(signal, name))
        noticed = self._until(identity, name, lambda: _noticed_at(incidents[known:], identity))
        stalled = self._until(identity, name, lambda: self._first_news(noticed))
        replaced = self._until(identity, name, lambda: time.monotonic() if self._replaced(identity, pid) else None)
        return Fault(identity, name, noticed - started, stalled - started, replaced - started)

    def _until(self, identity: str, name: str, happened: Callable[[], float | None]) -> float:
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline and not self.load.failed:
            if (at := happened()) is not None:
                return at
            time.sleep(_POLL_S)
        why = self.load.failed[0] if self.load.failed else f"not got over after {_LIMIT_S:.0f} s"
        raise EngineError(f"job=drill: {name} to {identity}: {why}")

    def _first_news(self, since: float) -> float | None:
        """When a request that is in flight got its first tokens after this moment."""
        with self._lock:
            heard = [one.news_at for one in self._live.values() if one.news_at is not None and one.news_at > since]
        return min(heard, default=None)

    def _replaced(self, identity: str, pid: int) -> bool:
        return self.engine.pids().get(identity, pid) != pid


def plan_faults(
    identities: Sequence[str], signals: Sequence[str], count: int, choose: random.Random
) -> list[tuple[str, str]]:
    """`count` pairs of a process and a signal: every pair as often as every other, or once more, in random order."""
    pairs = [(identity, name) for identity in identities for name in signals]
    planned: list[tuple[str, str]] = []
    while len(planned) < count:
        choose.shuffle(pairs)
        planned += pairs
    return planned[:count]


def _noticed_at(incidents, identity: str) -> float | None:
    return next((incident.noticed_at for incident in incidents if incident.identity == identity), None)
