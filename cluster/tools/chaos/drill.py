"""The drill: constant load, faults of one process or of two at once, and the seconds until the engine recovered.

Every request that runs meanwhile must end with the tokens of plain decoding, which the same engine gave before the
first fault. Uses an engine from outside: its processes, their ids, and what its clients receive. This machine only.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.protocol.messages import SamplingParams
from cluster.completion import Completion, EngineError
from cluster.config.jobs import DrillConfig
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.runtime.supervisor import Incident

_POLL_S = 0.005
_LIMIT_S = 90.0
"""Time to recover from a fault, after which the drill fails."""


Strike = tuple[str, str]
"""The identity of a process, and the name of the signal that it is sent."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Signals sent at one moment, and seconds from then on: until all were noticed (`noticed_s`), and until successors
    were ready (`replaced_s`). `stalled_s` is the longest time without a token for any client from that moment until
    the first token after `replaced_s`."""

    strikes: tuple[Strike, ...]
    noticed_s: float
    stalled_s: float
    replaced_s: float

    @property
    def kind(self) -> str:
        return "+".join(_role(identity) for identity, _ in self.strikes)

    @property
    def signal(self) -> str:
        return "+".join(name for _, name in self.strikes)


@dataclass(slots=True)
class TokenGap:
    """The longest time between two tokens, from `since` on."""

    since: float
    longest: float = 0.0

    def update(self, token_at: float) -> None:
        if token_at > self.since:
            self.since, self.longest = token_at, max(self.longest, token_at - self.since)


@dataclass(slots=True)
class DrillLoad:
    """Requests that ended during the drill: `unequal` with other tokens (prompt indices), `failed` with an error."""

    num_requests: int = 0
    num_tokens: int = 0
    unequal: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether requests ran, and all of them ended with the tokens of plain decoding."""
        return self.num_requests > 0 and not self.unequal and not self.failed


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
        self._indices = itertools.cycle(range(len(prompts)))
        self._live: dict[int, Completion] = {}
        self._ended_token_at = 0.0  # when a request that has ended last got tokens
        self.load = DrillLoad()
        self.faults: list[Fault] = []

    def run(self, plan: Sequence[tuple[Strike, ...]], job: DrillConfig, on_fault: Callable[[Fault], None]) -> None:
        """The whole plan, one fault after the other, then the end of what is in flight. Raises EngineError if the
        engine does not recover from one."""
        choose = random.Random(job.seed)
        clients = [threading.Thread(target=self._submit_all, name=f"client-{i}") for i in range(job.concurrency)]
        for client in clients:
            client.start()
        try:
            for strikes in plan:
                time.sleep(choose.uniform(0, 2 * job.spacing_s))
                self.faults.append(self._inflict(strikes))
                on_fault(self.faults[-1])
        finally:
            self._over.set()
            for client in clients:
                client.join()

    def _submit_all(self) -> None:
        """A client: one request after the other. Any error ends it, and the drill with it."""
        while not self._over.is_set():
            with self._lock:
                index = next(self._indices)
            try:
                completion = self.engine.submit(self._prompts[index].content, self._sampling)
                with self._lock:
                    self._live[completion.request_id] = completion
                token_ids = completion.result().token_ids
            except Exception as error:
                with self._lock:
                    self.load.failed.append(str(error) if isinstance(error, EngineError) else repr(error))
                return
            with self._lock:
                del self._live[completion.request_id]
                self._ended_token_at = max(self._ended_token_at, completion.last_token_at or 0.0)
                self.load.num_requests += 1
                self.load.num_tokens += len(token_ids)
                if token_ids != self._expected[index]:
                    self.load.unequal.append(index)

    def _inflict(self, strikes: tuple[Strike, ...]) -> Fault:
        incidents = self.engine.supervisor.incidents
        known, pids = len(incidents), self.engine.pids()
        started = time.monotonic()
        for identity, name in strikes:
            os.kill(pids[identity], getattr(signal, name))
        gap = TokenGap(started)
        identities = [identity for identity, _ in strikes]
        noticed = self._await(strikes, gap, lambda: _noticed_at(incidents[known:], identities))
        replaced = self._await(strikes, gap, lambda: self._replaced_at(identities, pids))
        self._await(strikes, gap, lambda: gap.since if gap.since > replaced else None)
        return Fault(strikes, noticed - started, gap.longest, replaced - started)

    def _await(self, strikes: tuple[Strike, ...], gap: TokenGap, happened_at: Callable[[], float | None]) -> float:
        """The time at which it happened; `gap` is kept up to date meanwhile."""
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline and not self.load.failed:
            with self._lock:
                live = [completion.last_token_at or 0.0 for completion in self._live.values()]
                gap.update(max([self._ended_token_at, *live]))
            if (at := happened_at()) is not None:
                return at
            time.sleep(_POLL_S)
        why = self.load.failed[0] if self.load.failed else f"no recovery after {_LIMIT_S:.0f} s"
        struck = " and ".join(f"{name} to {identity}" for identity, name in strikes)
        raise EngineError(f"job=drill: {struck}: {why}")

    def _replaced_at(self, identities: Sequence[str], before: dict[str, int]) -> float | None:
        now = before | self.engine.pids()
        replaced = all(now[identity] != before[identity] for identity in identities)
        return time.monotonic() if replaced else None


def plan_faults(
    identities: Sequence[str], signals: Sequence[str], count: int, choose: random.Random, *, pairs: float = 0.0
) -> list[tuple[Strike, ...]]:
    """`count` faults in random order, a share of them `pairs`; each choice occurs equally often, or once more."""
    strikes = [(identity, name) for identity in identities for name in signals]
    both = [(a, b) for a, b in itertools.combinations(strikes, 2) if _role(a[0]) != _role(b[0])]
    num_pairs = round(count * pairs) if both else 0
    planned = _deal([(strike,) for strike in strikes], count - num_pairs, choose) + _deal(both, num_pairs, choose)
    choose.shuffle(planned)
    return planned


def _deal(choices: Sequence[tuple[Strike, ...]], count: int, choose: random.Random) -> list[tuple[Strike, ...]]:
    dealt: list[tuple[Strike, ...]] = []
    while len(dealt) < count:
        dealt += choose.sample(choices, len(choices))
    return dealt[:count]


def _role(identity: str) -> str:
    return identity.partition("-")[0]


def _noticed_at(incidents: Sequence[Incident], identities: Sequence[str]) -> float | None:
    """When the end of the last of these processes was noticed; None until then."""
    noticed = {incident.identity: incident.noticed_at for incident in reversed(incidents)}
    return max(noticed[identity] for identity in identities) if noticed.keys() >= set(identities) else None
