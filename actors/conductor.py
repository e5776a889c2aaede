"""The coordinator's loop: moves records between the hub and the pure `Coordinator`, and nothing else.

Runs in an actor, a thread or a process of its own. Before the first round it gathers one `Ready` per rank; a client's
`Hello` is answered with them. It never loads a model, and torch is not needed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.chronicle import Chronicle
from actors.coordinator import Coordinator
from actors.levels import is_spared, role_above, role_beneath, role_name
from actors.lifecycle import Failure, Hello, Ready, RoleLost, Stop
from actors.messages import (
    Abort,
    DraftBatch,
    ProposalBatch,
    ReportOrder,
    Request,
    VerdictBatch,
    VerifyBatch,
)
from actors.options import SchedulerConfig
from actors.pipelines import PIPELINES
from actors.scheduler import Capacity, Load, Scheduler
from actors.tally import Tally
from actors.wire import Hub

CLIENT = "client"
"""Identity of the one link that receives tokens; other clients' links only send."""


@dataclass(frozen=True, slots=True)
class CoordinatorSpec:
    """What a coordinator needs to know before it starts; plain values, so that it travels anywhere."""

    pipeline: str
    num_draft_tokens: int
    target_ranks: int
    draft_ranks: int
    eos_token_ids: tuple[int, ...]
    limits: SchedulerConfig = field(default_factory=SchedulerConfig)
    level_ranks: tuple[int, ...] = ()
    """Ranks of the levels of a cascade beneath the drafter, if they have their own: draft2, draft3, ..."""

    def identities(self, role: str) -> tuple[str, ...]:
        return tuple(f"{role}-{rank}" for rank in range(self.sizes.get(role, 0)))

    @property
    def sizes(self) -> dict[str, int]:
        levels = {role_name(place): size for place, size in enumerate(self.level_ranks, 1)}
        return {"target": self.target_ranks, "draft": self.draft_ranks, **levels}


@dataclass(frozen=True, slots=True)
class Glance:
    """What a watch is shown about once a second, before every reset of the tally, and at the end."""

    tally: Tally
    load: Load
    ready: Mapping[str, Ready]


Watch = Callable[[Glance], None]


class Conductor:
    """Owns the hub for the life of one engine."""

    def __init__(self, spec: CoordinatorSpec, hub: Hub, watches: Sequence[Watch] = ()) -> None:
        self._spec = spec
        self._hub = hub
        self._watches = watches
        self._chronicle = Chronicle()
        self._watched = time.monotonic()
        self._ordered: tuple[int, float] = (0, 0.0)  # the last pass: its round, and when it left
        self._targets = spec.identities("target")
        self._drafters = spec.identities("draft")
        self._ready: dict[str, Ready] = {}
        self._greeted = False
        self._coordinator: Coordinator | None = None

    def run(self) -> str:
        """Serve until a `Stop` arrives; returns its reason. However this ends, no rank is left waiting."""
        stop = Stop("the coordinator failed")
        try:
            stop = self._serve()
            self._hub.send([CLIENT], stop)
            return stop.reason
        finally:
            self._hub.send([name for role in self._spec.sizes for name in self._spec.identities(role)], stop)
            self._look()

    def _serve(self) -> Stop:
        while True:
            received = self._hub.receive(timeout_s=1.0)
            if received is not None:
                identity, record = received
                if isinstance(record, ReportOrder):
                    self._look()
                self._chronicle.received(record)
                if isinstance(record, Stop):
                    return record
                self._take(identity, record)
            if time.monotonic() - self._watched >= 1.0:
                self._look()

    def _look(self) -> None:
        self._watched = time.monotonic()
        if self._coordinator is None:
            return
        self._coordinator.settle(self._watched)
        glance = Glance(self._coordinator.tally, self._coordinator.load(), self._ready)
        self._chronicle.progress(glance.tally, glance.load)
        for watch in self._watches:
            watch(glance)

    def _take(self, identity: str, record: object) -> None:
        role = identity.rpartition("-")[0]
        match record:
            case DraftBatch():
                self._hub.send(self._spec.identities(role_beneath(role)), record)
            case ProposalBatch() if is_spared(identity):
                self._hub.send(self._spec.identities(role_above(role)), record)
            case Failure() if is_spared(identity) and self._coordinator is not None:
                self._hub.send(self._spec.identities(role_above(role)), RoleLost(role))
            case VerdictBatch() | ProposalBatch() | Request() | Abort() | ReportOrder():
                assert self._coordinator is not None, "a client speaks only after it was greeted"
                now = time.monotonic()
                if isinstance(record, VerdictBatch) and record.round == self._ordered[0]:
                    self._coordinator.tally.crossed(now - self._ordered[1], record.finished - record.started)
                for answer in self._coordinator.on(record, now):
                    self._send(answer)
            case Ready():
                self._ready[identity] = record
                self._greet()
            case Hello():
                self._greeted = True
                self._greet()
            case Failure():
                self._hub.send([CLIENT], record)
            case _:
                raise TypeError(f"{identity} sent {type(record).__name__}, which has no meaning here")

    def _send(self, record: object) -> None:
        self._chronicle.sent(record)
        if isinstance(record, VerifyBatch):
            self._ordered = (record.round, time.monotonic())
            self._hub.send(self._targets, record)
        elif isinstance(record, DraftBatch):
            self._hub.send(self._drafters, record)
        else:
            self._hub.send([CLIENT], record)

    def _greet(self) -> None:
        """Once every rank is there, size the scheduler by what the target measured and tell the client."""
        if not self._greeted or len(self._ready) < sum(self._spec.sizes.values()):
            return
        if self._coordinator is None:
            self._coordinator = self._make_coordinator()
        for ready in self._ready.values():
            self._hub.send([CLIENT], ready)

    def _make_coordinator(self) -> Coordinator:
        facts = self._ready["target-0"].facts
        capacity = Capacity(int(facts["kv_slots"]), int(facts["max_model_len"]))
        return Coordinator(
            Scheduler(self._spec.limits, capacity),
            PIPELINES[self._spec.pipeline](self._spec.num_draft_tokens),
            self._spec.eos_token_ids,
            drafts=bool(self._drafters),
            now=time.monotonic(),
        )
