"""The coordinator's loop: moves records between the hub, the musters of the roles and the pure `Coordinator`.

Runs in an actor, a thread or a process of its own. It serves once every role is complete; a role that falls apart
later is gathered again while the other goes on. A successor knows nobody: it hears the ranks' heartbeats, gathers
them, and waits for the client to ask again. It never loads a model, and torch is not needed here.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.coordinator.clients import CLIENT, Clients
from actors.coordinator.event_log import EventLog
from actors.coordinator.membership import RoleMembership
from actors.coordinator.round_timeout import RoundTimeout
from actors.coordinator.scheduler import Capacity, Load, Scheduler
from actors.coordinator.state_machine import Coordinator
from actors.coordinator.stats import CoordinatorStats
from actors.options import SchedulerConfig
from actors.policy.draft_length import make_control
from actors.policy.pipelines import PIPELINES
from actors.protocol.membership import HEARTBEAT_S, Alive, Hello, RankLost, Ready, RoleBack, RoleLost, Stop, identity_of
from actors.protocol.messages import (
    Abort,
    DraftBatch,
    DraftPreviewBatch,
    ProposalBatch,
    ReportOrder,
    Request,
    VerdictBatch,
    VerifyBatch,
)
from actors.topology import role_above, role_beneath, role_name
from actors.transport.channel import Hub, link_name

GENERATION = 10**9
"""Rounds and epochs of one incarnation of the coordinator: its successor's numbers are all larger."""
EPOCHS = 10**6
IDLE_S = 2e-4
"""A drafter that begins so long after its last pass was waiting for the order, and not the order for the pass."""
COUNTERPARTS = ("target", "draft")
"""Roles the state machine works with; what is beneath works for the drafter."""


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
    silence_s: float = 0.0
    """A rank that is not heard of for so long hangs; 0 = none ever does."""
    incarnation: int = 0
    adaptive: bool = False
    min_draft_tokens: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks of each role there is."""
        levels = {role_name(place): size for place, size in enumerate((self.draft_ranks, *self.level_ranks)) if size}
        return {"target": self.target_ranks, **levels}


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """What a watch is shown about once a second, before every reset of the tally, and at the end."""

    stats: CoordinatorStats
    load: Load
    ready: Mapping[str, Ready]


Watch = Callable[[StatsSnapshot], None]


class CoordinatorService:
    """Speaks for one incarnation of the coordinator. `store` is where the ranks of a role meet."""

    def __init__(
        self,
        spec: CoordinatorSpec,
        hub: Hub,
        watches: Sequence[Watch] = (),
        store: tuple[str, int] | None = None,
    ) -> None:
        self._spec = spec
        self._hub = hub
        self._clients = Clients(hub)
        self._watches = watches
        self._event_log = EventLog()
        self._store = store
        self._watched = self._ticked = time.monotonic()
        self._awake_s = 0.0  # by its own clock: while this process itself stood still, nobody was silent
        self._left: dict[str, tuple[int, float]] = {}  # by role, the order that is out: its round, and when it left
        first_epoch = spec.incarnation * EPOCHS + 1
        self._memberships = {role: RoleMembership(role, size, first_epoch) for role, size in spec.sizes.items()}
        self._round_timeouts = {role: RoundTimeout() for role in self._memberships}
        self._complete = dict.fromkeys(self._memberships, False)
        self._greeted = False
        self._coordinator: Coordinator | None = None

    def run(self) -> str:
        """Serve until a `Stop` arrives; returns its reason. Ranks of a conductor that fails wait for its successor."""
        try:
            stop = self._serve()
            self._hub.send(self._clients.connected(), stop)
            for role in self._memberships:
                self._hub.send(self._names(role), stop)
            return stop.reason
        finally:
            self._look()

    def _serve(self) -> Stop:
        while True:
            received = self._hub.receive(timeout_s=self._rest_s())
            if received is None:
                self._hurry()
            else:
                identity, record = received
                if isinstance(record, ReportOrder):
                    self._look()
                self._event_log.received(record)
                if isinstance(record, Stop):
                    return record
                self._take(identity, record)
            if time.monotonic() - self._ticked >= HEARTBEAT_S:
                self._tick()
            if time.monotonic() - self._watched >= 1.0:
                self._look()

    def _rest_s(self) -> float:
        """How long to listen: the state machine may want to know when what it waits for has not come."""
        ends = self._coordinator.patience_ends if self._coordinator is not None else None
        return HEARTBEAT_S if ends is None else min(HEARTBEAT_S, max(0.0, ends - time.monotonic()))

    def _hurry(self) -> None:
        """Nothing has arrived; perhaps nothing need be waited for any more."""
        if self._coordinator is not None:
            for answer in self._coordinator.overdue(time.monotonic()):
                self._send(answer)

    def _look(self) -> None:
        self._watched = time.monotonic()
        if self._coordinator is None:
            return
        self._coordinator.settle(self._watched)
        ready = {
            identity_of(one.role, one.rank): one
            for membership in self._memberships.values()
            for one in membership.ready()
        }
        snapshot = StatsSnapshot(self._coordinator.stats, self._coordinator.load(), ready)
        self._event_log.progress(snapshot.stats, snapshot.load)
        for watch in self._watches:
            watch(snapshot)

    def _tick(self) -> None:
        """What has to happen even while nobody says anything."""
        now = time.monotonic()
        self._awake_s += min(now - self._ticked, 2 * HEARTBEAT_S)
        self._ticked = now
        alive = Alive(
            "coordinator", 0, self._spec.incarnation, os.getpid(), waiting=self._coordinator is None, at_change=False
        )
        self._hub.send(self._clients.connected(), alive)
        for request_id in self._clients.abandoned(now):
            self._tell(Abort(request_id))
        limit_s = self._spec.silence_s
        for role, membership in self._memberships.items():
            for silent in membership.silent(
                limit_s, self._awake_s, self._round_timeouts[role].limit_s if limit_s else math.inf
            ):
                self._hub.send([CLIENT], silent)
            self._attend(membership)

    # --- records ------------------------------------------------------------------------------------------------------

    def _take(self, identity: str, record: object) -> None:
        match record:
            case VerdictBatch() | ProposalBatch() | DraftPreviewBatch() | DraftBatch():
                role = identity.partition("#")[0].rpartition("-")[0]
                if role in self._memberships and [identity] == self._names(role)[:1]:
                    self._take_from_lead(role, record)
            case Request() | ReportOrder():
                self._clients.asked(identity, record)
                self._tell(record)
            case Abort():
                self._tell(record)
            case Alive() if record.role in self._memberships:
                self._hear(record)
            case Ready() if record.role in self._memberships:
                membership = self._memberships[record.role]
                membership.joined(record)
                self._attend(membership)
            case RankLost() if record.role in self._memberships:
                membership = self._memberships[record.role]
                membership.lose(record.rank, record.incarnation, self._awake_s)
                self._attend(membership)
            case Hello():
                self._greeted = True
                if self._coordinator is None:
                    self._open()
                else:
                    self._greet(self._memberships)

    def _take_from_lead(self, role: str, record: VerdictBatch | ProposalBatch | DraftPreviewBatch | DraftBatch) -> None:
        """An answer for the state machine, or what a level of a cascade and the one beneath it say to each other."""
        if isinstance(record, DraftBatch):
            beneath = role_beneath(role)
            if self._complete.get(beneath) and record.epoch == self._memberships[beneath].epoch:
                self._round_timeouts[beneath].ordered(record)
                self._hub.send(self._names(beneath), record)
            return
        if not isinstance(record, DraftPreviewBatch):
            self._round_timeouts[role].answered(record)
        if role in COUNTERPARTS:
            self._tell(record)
        elif isinstance(record, ProposalBatch):
            self._hub.send(self._names(role_above(role)), record)

    def _hear(self, alive: Alive) -> None:
        membership, coordinator = self._memberships[alive.role], self._coordinator
        if not membership.hear(alive, self._awake_s):
            return
        awaited = coordinator is not None and alive.role in COUNTERPARTS and coordinator.awaits(alive.role)
        if membership.doubts(alive, coordinator.last_round(alive.role) if awaited else None):
            coordinator.stats.num_lost_records += 1
            membership.start_new_epoch(self._awake_s)
        self._attend(membership)

    def _tell(self, record: object) -> None:
        """To the state machine; before there is one, a client speaks in vain and asks again."""
        if self._coordinator is None:
            return
        now = time.monotonic()
        if isinstance(record, ReportOrder):
            self._coordinator.stats.num_unreadable = self._hub.num_unreadable
        if isinstance(record, VerdictBatch):
            self._cross("target", record, now)
        elif isinstance(record, ProposalBatch):
            self._cross("draft", record, now)
        for answer in self._coordinator.on(record, now):
            self._send(answer)

    def _cross(self, role: str, answer: VerdictBatch | ProposalBatch, now: float) -> None:
        """The first answer to an order measures the line, unless the order had to wait for a pass of draft-ahead."""
        round_, left = self._left.pop(role, (0, 0.0))
        ahead = answer.ahead if isinstance(answer, ProposalBatch) else ()
        was_idle = not ahead or answer.started - ahead[-1][1] > IDLE_S
        if answer.round == round_ and was_idle:
            self._coordinator.stats.crossed(role, now - left, answer.finished - answer.started)

    def _send(self, record: object) -> None:
        self._event_log.sent(record)
        role = "target" if isinstance(record, VerifyBatch) else "draft"
        if isinstance(record, VerifyBatch | DraftBatch):
            self._left[role] = (record.round, time.monotonic())
            self._round_timeouts[role].ordered(record)
            self._hub.send(self._names(role), record)
        else:
            self._hub.send([self._clients.client_of(record)], record)

    def _names(self, role: str, ranks: Iterable[int] | None = None) -> list[str]:
        """Links of those who play these ranks of a role now; by default of all of them."""
        membership = self._memberships[role]
        chosen = range(membership.size) if ranks is None else ranks
        known = [(rank, membership.incarnation(rank)) for rank in chosen]
        return [link_name(identity_of(role, rank), one) for rank, one in known if one is not None]

    # --- roles that come and go ---------------------------------------------------------------------------------------

    def _attend(self, membership: RoleMembership) -> None:
        """Tell the ranks what they have to be told, and the state machine whether the role is there."""
        role = membership.role
        for ranks, order in membership.orders(self._last_round(role), self._store, self._awake_s):
            self._hub.send(self._names(role, ranks), order)
        if membership.serving == self._complete[role]:
            return
        self._complete[role] = membership.serving
        self._tell_neighbours(role)
        if membership.serving and self._coordinator is None:
            self._open()
        elif membership.serving:
            self._greet([role])

    def _last_round(self, role: str) -> int:
        """Of the last batch that the role was sent before the epoch it is called to."""
        if role not in COUNTERPARTS:
            return 0  # levels count anew: so do those above them, if they are new
        return self._coordinator.last_round(role) if self._coordinator else self._spec.incarnation * GENERATION

    def _tell_neighbours(self, role: str) -> None:
        """A role has come or gone: who works with it has to know."""
        news = self._news_of(role)
        if role in COUNTERPARTS:
            self._tell(news)
        else:
            self._hub.send(self._names(role_above(role)), news)
        beneath = None if role == "target" else self._memberships.get(role_beneath(role))
        if beneath is None:
            return
        if self._complete[role]:  # its ranks may be new, and know nothing of the level beneath
            self._hub.send(self._names(role), self._news_of(beneath.role))
        elif beneath.serving:  # what it was told, it was told by one who is gone
            beneath.start_new_epoch(self._awake_s)
            self._attend(beneath)

    def _news_of(self, role: str) -> RoleBack | RoleLost:
        return RoleBack(role, self._memberships[role].epoch) if self._complete[role] else RoleLost(role)

    def _open(self) -> None:
        """Begin to serve: the first time once everybody is there, a successor as soon as there is a target."""
        needed = ["target"] if self._spec.incarnation else list(self._memberships)
        if self._coordinator is not None or not self._greeted or not all(self._complete[role] for role in needed):
            return
        (facts,) = [ready.facts for ready in self._memberships["target"].ready() if ready.rank == 0]
        self._coordinator = Coordinator(
            Scheduler(self._spec.limits, Capacity(int(facts["kv_slots"]), int(facts["max_model_len"]))),
            PIPELINES[self._spec.pipeline](self._spec.num_draft_tokens),
            self._spec.eos_token_ids,
            drafts="draft" in self._memberships,
            control=make_control(self._spec.adaptive, self._spec.min_draft_tokens, self._spec.num_draft_tokens),
            now=time.monotonic(),
            first_round=self._spec.incarnation * GENERATION,
        )
        self._greet(self._memberships)
        for role in COUNTERPARTS:
            if not self._complete.get(role, True):
                self._tell(RoleLost(role))

    def _greet(self, roles: Iterable[str]) -> None:
        """Send every client what the ranks of these roles measured."""
        for role in roles:
            for ready in self._memberships[role].ready():
                self._hub.send(self._clients.connected(), ready)
