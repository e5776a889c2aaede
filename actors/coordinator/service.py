"""The coordinator's loop: moves records between the hub, the memberships of the roles and the pure `Coordinator`.

Runs in an actor, a thread or a process of its own. It starts decoding once every role is complete; a role that breaks
later is gathered again while the others go on. A successor of a coordinator that failed starts without state: it learns
the ranks from their heartbeats, gathers them, and clients submit their requests again. Loads no model and no torch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from actors.coordinator.clients import CLIENT, Clients
from actors.coordinator.event_log import EventLog
from actors.coordinator.loop_heartbeat import LoopHeartbeat
from actors.coordinator.membership import RoleMembership
from actors.coordinator.port import open_port
from actors.coordinator.record_checks import RecordChecks
from actors.coordinator.scheduler import Capacity, Scheduler
from actors.coordinator.spec import CoordinatorSpec
from actors.coordinator.state_machine import Answer, Coordinator
from actors.coordinator.stats import CoordinatorStats, StatsSnapshot, Watch
from actors.heap import freeze_libraries
from actors.policy.policy import make_policy
from actors.protocol.grammar import MOST_GRAMMAR_CHARACTERS
from actors.protocol.membership import (
    HEARTBEAT_S,
    Alive,
    ClientKeys,
    Hello,
    PassFailed,
    RankLost,
    Ready,
    Recall,
    RoleBack,
    RoleLost,
    Stop,
)
from actors.protocol.messages import (
    Abort,
    DraftBatch,
    DraftPreviewBatch,
    Outputs,
    ProposalBatch,
    Report,
    ReportOrder,
    Request,
    Tokens,
    UpdateWeights,
    VerdictBatch,
    VerifyBatch,
    WeightsUpdated,
)
from actors.protocol.records import replace
from actors.topology import child_role, is_draft_role, parent_role
from actors.transport.channel import Hub, heart_of
from actors.transport.keys import CLIENTS, OUT, peer_of

if TYPE_CHECKING:
    from actors.coordinator.bridging import Bridging

ROUNDS_PER_INCARNATION = 10**9
"""Offset between the round numbers of a coordinator and those of its successor."""
EPOCHS_PER_INCARNATION = 10**6
"""The same for epochs."""
ROUNDS_AT_ONCE = 4
"""Rounds that the policy learns from at once where a drafter is attached: nothing else is hidden behind a pass, and
after one the caches hold neither code nor records."""
LONGEST_FIELDS = (1 << 17) + 4 * MOST_GRAMMAR_CHARACTERS
"""Bytes of a request beside its text and reference: at the bounds of `SamplingParams` about 100,000, and a grammar."""
TOKEN_BYTES = 5
"""Bytes of a token id in a record, at most."""


def _state_of(membership: RoleMembership) -> RoleBack | RoleLost:
    """What its neighbours are to know of a role."""
    role = membership.role
    return RoleBack(role, membership.epoch) if membership.is_complete else RoleLost(role)


class CoordinatorService:
    """One incarnation of the coordinator. `store` is the address where the ranks of a role form their process group."""

    def __init__(
        self, spec: CoordinatorSpec, hub: Hub, watches: Sequence[Watch] = (), store: tuple[str, int] | None = None
    ) -> None:
        self._spec = spec
        self._hub = hub
        self._clients = Clients(hub)
        self._checks = RecordChecks(spec.sizes, spec.num_draft_tokens, self._clients, spec.drafters)
        self._watches = watches
        self._event_log = EventLog()
        self._store = store
        self._published_at = self._watched_at = time.monotonic()
        self._awake_s = 0.0  # seconds that this process ran; a suspension of it is not a silence of the ranks
        self._asleep_until = -math.inf
        first_epoch = spec.incarnation * EPOCHS_PER_INCARNATION + 1
        self._memberships = {role: RoleMembership(role, size, first_epoch) for role, size in spec.sizes.items()}
        self._lead_roles = spec.lead_roles
        self._bridging: Bridging | None = None
        if spec.bridged:
            from actors.coordinator.bridging import Bridging  # for drafters that are sent hidden states alone

            self._bridging = Bridging(self._memberships["target"], self._memberships["draft"])
        self._has_client = False
        self._awaits_report: set[str] = set()  # clients other than the owner
        self._memberships["target"].weights = spec.weights
        self._coordinator: Coordinator | None = None  # None until the roles that it needs are complete
        self._stop: Stop | None = None  # that ends the service

    def run(self) -> str:
        """Serve until a `Stop` arrives; returns its reason. If this raises, the ranks wait for a successor."""
        freeze_libraries()
        heartbeat = LoopHeartbeat(self._send_heartbeat)
        try:
            self._hub.serve_near(self._take_near)
            stop = self._serve(heartbeat)
            self._hub.send(self._clients.connected(), stop)
            for membership in self._memberships.values():
                links = membership.links
                self._hub.send([*links, *map(heart_of, links)], stop)
            return stop.reason
        finally:
            self._hub.serve_near(None)
            heartbeat.stop()
            self._publish_snapshot()

    def _serve(self, heartbeat: LoopHeartbeat) -> Stop:
        while self._stop is None:
            received = self._hub.receive(timeout_s=self._timeout_s())
            with self._hub.turn():
                if received is None:
                    self._stop_waiting()
                else:
                    self._take(*received)
                if self._coordinator is not None:
                    self._coordinator.learn()
                now = time.monotonic()
                if heartbeat.beat(now):
                    self._watch_others(now)
                if now - self._published_at >= 1.0:
                    self._publish_snapshot()
        return self._stop

    def _take(self, link: str, record: object) -> None:
        """Act on a record, if it is valid."""
        try:
            self._checks.check(link, record)
            if isinstance(record, VerdictBatch) and (coordinator := self._coordinator) is not None:
                coordinator.check(record)
        except ValueError as error:
            self._drop(link, record, error)
            return
        match record:
            case VerdictBatch() | ProposalBatch() | DraftPreviewBatch() | DraftBatch():
                self._dispatch_batch(link, record)
            case Request():
                self._submit(link, record)
            case Abort():
                if (number := self._clients.number_of(link, record.request_id)) is not None:
                    self._abort(number)
            case ReportOrder():
                self._order_report(link.removesuffix(OUT), record)
            case _:
                self._dispatch(link, record)

    def _take_near(self, link: str, record: object) -> None:
        """A record of another thread of this process, in that thread; the own one ends, learns and wakes in time."""
        self._take(link, record)
        learns = self._coordinator is not None and self._coordinator.may_learn
        if self._stop is not None or learns or self._wait_until() < self._asleep_until:
            self._hub.wake()

    def _stop_waiting(self) -> None:
        if self._coordinator is not None:
            self._send(self._coordinator.stop_waiting(time.monotonic()))

    def _wait_until(self) -> float:
        """The time at which waiting for drafts ends; infinite while nothing is waited for."""
        wait_until = self._coordinator.wait_until if self._coordinator is not None else None
        return math.inf if wait_until is None else wait_until

    def _timeout_s(self) -> float:
        """Seconds to wait for a record: until the next heartbeat, or until drafts are waited for no longer."""
        now = time.monotonic()
        self._asleep_until = now + HEARTBEAT_S  # before the question: what comes afterwards wakes this thread
        self._asleep_until = min(self._asleep_until, max(now, self._wait_until()))
        return self._asleep_until - now

    def _publish_snapshot(self) -> None:
        self._published_at = time.monotonic()
        if self._coordinator is None:
            return
        self._count_link_trips(self._coordinator.stats)
        self._coordinator.count_active_time(self._published_at)
        ready = [record for membership in self._memberships.values() for record in membership.ready()]
        snapshot = StatsSnapshot(self._coordinator.stats, self._coordinator.load(), ready)
        self._event_log.progress(snapshot.stats, snapshot.load)
        for watch in self._watches:
            watch(snapshot)

    def _count_link_trips(self, stats: CoordinatorStats) -> None:
        for role in self._lead_roles:
            if (membership := self._memberships.get(role)) is not None:
                stats.add_link_trips(role, membership.rounds.take_trips())

    def _send_heartbeat(self) -> None:
        """Greets every client; may be called from any thread."""
        is_waiting = self._coordinator is None
        alive = Alive("coordinator", 0, self._spec.incarnation, os.getpid(), waiting=is_waiting, off_schedule=False)
        self._hub.send(self._clients.connected(), alive)

    def _watch_others(self, now: float) -> None:
        """Send the report that is due; abort the requests of absent clients; report ranks that hang."""
        self._awake_s += min(now - self._watched_at, 2 * HEARTBEAT_S)
        self._watched_at = now
        self._send_shared_report()
        for number in self._clients.abandoned(now):
            self._abort(number)
        for role, membership in self._memberships.items():
            for report in membership.find_hanging(self._silence_s(role), self._awake_s):
                self._hub.send([CLIENT], report)
            self._follow(membership)

    def _silence_s(self, role: str) -> float:
        """Seconds without a heartbeat after which a rank of this role is lost; 0: never."""
        return (self._spec.lent_silence_s if is_draft_role(role) else 0.0) or self._spec.silence_s

    # --- records ------------------------------------------------------------------------------------------------------

    def _drop(self, link: str, record: object, error: ValueError) -> None:
        """A record that is not valid; a client learns why its request is not."""
        self._hub.refuse(link, error)
        self._distrust(link, record, error)
        if isinstance(record, Request):
            self._refuse(link, record, "error", str(error))

    def _refuse(self, link: str, request: Request, reason: str, why: str) -> None:
        refusal = Tokens(request.request_id, 0, (), reason, None, why)
        self._hub.send([link.removesuffix(OUT)], Outputs((refusal,)))

    def _dispatch(self, link: str, record: object) -> None:
        """What a rank says of itself, and the owner of the engine."""
        self._event_log.received(record)
        match record:
            case Alive() if record.role in self._memberships:
                self._receive_heartbeat(record)
            case Ready() if record.role in self._memberships:
                self._memberships[record.role].record_ready(record)
                self._follow(self._memberships[record.role])
            case PassFailed("target") | UpdateWeights():  # a failure of a drafter costs speed only
                self._apply_record(record)
            case RankLost() if record.role in self._memberships:
                self._memberships[record.role].mark_lost(record.rank, record.incarnation, self._awake_s)
                self._follow(self._memberships[record.role])
            case Stop():
                self._stop = record
            case ClientKeys():
                self._hub.admit_clients({public: CLIENTS + name for public, name in record.keys})
            case Hello():
                self._has_client = True
                if self._coordinator is None:
                    self._start()
                else:
                    self._send_ready(self._memberships, [link.removesuffix(OUT)])

    def _dispatch_batch(self, link: str, batch: VerdictBatch | ProposalBatch | DraftPreviewBatch | DraftBatch) -> None:
        """A batch from the present lead of a role: for the state machine, or between two levels of a cascade."""
        role = link.partition("#")[0].rpartition("-")[0]
        membership, coordinator = self._memberships.get(role), self._coordinator
        if membership is None or link not in membership.links[:1]:
            return
        if isinstance(batch, DraftBatch):
            child = self._memberships.get(child_role(role))
            if child is not None and child.is_complete and batch.epoch == child.epoch:
                self._send_batch(child, batch)
            return
        now = time.monotonic()
        if not isinstance(batch, DraftPreviewBatch):
            membership.rounds.answered(batch, now)
        if role not in self._lead_roles:
            if isinstance(batch, ProposalBatch):
                self._send_to_parent(role, batch)
        elif coordinator is not None:
            self._send(coordinator.on(batch, now, role))

    def _receive_heartbeat(self, alive: Alive) -> None:
        membership, coordinator = self._memberships[alive.role], self._coordinator
        if not membership.record_heartbeat(alive, self._awake_s):
            return
        awaited = None
        if coordinator is not None and alive.role in self._lead_roles and coordinator.awaits(alive.role):
            awaited = coordinator.last_round(alive.role)
        if membership.suspects_missed_batch(alive, awaited, self._awake_s) and coordinator is not None:
            coordinator.stats.num_lost_records += 1
            membership.start_new_epoch(self._awake_s)
        self._follow(membership)

    def _apply_record(self, record: object) -> None:
        """Pass a record to the state machine. Before there is one the record is dropped."""
        if self._coordinator is not None:
            self._send(self._coordinator.on(record, time.monotonic()))

    def _submit(self, link: str, request: Request) -> None:
        """Admits a request; before there is a state machine it is dropped, and its client sends it again."""
        if (why := self._clients.quota_refusal(link, request)) is not None:
            self._refuse(link, request, "refused", why)
        elif self._coordinator is not None:
            admitted = self._clients.admit(link, request)
            self._event_log.admitted(admitted, link.removesuffix(OUT), request.request_id)
            self._apply_record(admitted)

    def _abort(self, number: int) -> None:
        abort = Abort(number)
        self._event_log.received(abort)
        self._apply_record(abort)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _order_report(self, client: str, order: ReportOrder) -> None:
        """The owner's is made at once. Those of all others, however many, share one at the next heartbeat, which begins
        no window and has no spans: only the owner's cost what they cost."""
        if client != CLIENT:
            self._awaits_report.add(client)
            return
        if order.reset:
            self._publish_snapshot()
        self._event_log.received(order)
        self._send_report([CLIENT], order)

    def _send_shared_report(self) -> None:
        clients, self._awaits_report = self._awaits_report, set()
        if clients:
            self._send_report([*clients], ReportOrder())

    def _send_report(self, clients: Sequence[str], order: ReportOrder) -> None:
        """Sends a report; before there is a state machine none is sent, and clients order again."""
        if self._coordinator is None:
            return
        stats = self._coordinator.stats
        stats.num_unreadable = self._hub.num_unreadable
        self._count_link_trips(stats)
        for report in self._coordinator.on(order, time.monotonic()):
            assert isinstance(report, Report)
            self._hub.send(clients, report if CLIENT in clients else replace(report, spans=()))

    def _send(self, records: Iterable[Answer]) -> None:
        """Tokens last, all those of a client in one record: it wakes once a round."""
        outputs: dict[str, list[Tokens]] = {}
        for record in records:
            match record:
                case VerifyBatch():
                    self._send_batch(self._memberships["target"], record)
                case DraftBatch():
                    self._send_batch(self._memberships[self._lead_roles[1 + record.seat]], record)
                case Tokens():
                    client, request = self._clients.origins[record.request_id]
                    if record.finish_reason is not None:
                        self._event_log.finished(record)
                        self._clients.forget(record.request_id)
                    if client not in outputs:
                        outputs[client] = []
                    outputs[client].append(replace(record, request_id=request.request_id))
                case WeightsUpdated():
                    self._end_update(record)
        for client, news in outputs.items():
            self._hub.send([client], Outputs(tuple(news)))

    def _send_batch(self, membership: RoleMembership, batch: VerifyBatch | DraftBatch) -> None:
        """Multicast a batch to the ranks of a role."""
        membership.rounds.ordered(batch, time.monotonic())
        self._hub.send(membership.links, batch)

    def _end_update(self, update: WeightsUpdated) -> None:
        """Ranks that join from now on serve these weights too."""
        self._event_log.updated(update)
        if not update.refusal and self._coordinator is not None:
            self._memberships["target"].weights = self._coordinator.weights
        self._hub.send([CLIENT], update)

    # --- roles that are lost and return -------------------------------------------------------------------------------

    def _distrust(self, link: str, record: object, error: ValueError) -> None:
        """A record was refused: of a rank whatever else it says may be wrong, so its process is replaced. Where none
        can be ended, because it is a thread or `silence_s` is 0, the role starts anew. Requests may be the reason."""
        role, _, rank = peer_of(link).rpartition("-")
        membership = self._memberships.get(role)
        if membership is None or link.partition("/")[0] not in membership.links:
            return
        why = f"sent a record that was refused ({error})"
        self._event_log.refused(role, int(rank), why)
        if self._coordinator is not None:
            counts = self._coordinator.stats.num_refused
            counts[role] = counts.get(role, 0) + 1
        if role == "target" and isinstance(record, VerdictBatch):
            self._apply_record(PassFailed(role, int(rank), 0, record.round, why))
        if self._silence_s(role):
            self._hub.send([CLIENT], membership.distrust(int(rank), why, self._awake_s))
        else:
            membership.start_new_epoch(self._awake_s)
        self._follow(membership)

    def _follow(self, membership: RoleMembership) -> None:
        """Send the orders that are due, and notify the neighbours if the role became complete or incomplete."""
        if self._bridging is None or membership.role not in self._lead_roles:
            self._follow_role(membership)
            return
        assert self._store is not None
        for links, order in self._bridging.follow(self._store, self._awake_s):
            # to the heartbeats too: the target may wait for a drafter that was at the end of the last bridge
            self._hub.send([*links, *map(heart_of, links)], order)
        for role in self._lead_roles:
            self._follow_role(self._memberships[role])

    def _follow_role(self, membership: RoleMembership) -> None:
        role = membership.role
        for ranks, order in membership.orders(self._last_round(role), self._store, self._awake_s):
            links = membership.links_of(ranks)
            # a rank that waits inside a pass for a dead peer reads nothing but the link of its heartbeats
            hearts = [heart_of(link) for link in links] if isinstance(order, Recall) else []
            self._hub.send([*links, *hearts], order)
        # a drafter that is sent hidden states can draft once the bridge stands
        is_complete = membership.serving and (role != "draft" or self._bridging is None or self._bridging.stands)
        if is_complete == membership.is_complete:
            return
        membership.is_complete = is_complete
        self._notify_neighbours(membership)
        if is_complete and self._coordinator is None:
            self._start()
        elif is_complete:
            self._send_ready([role], self._clients.connected())

    def _last_round(self, role: str) -> int:
        """Round of the last batch that the role was sent in the epochs before."""
        if role not in self._lead_roles:
            return 0  # a level's rounds start anew in each epoch, since the level above may be new too
        if self._coordinator is None:
            return self._spec.incarnation * ROUNDS_PER_INCARNATION
        return self._coordinator.last_round(role)

    def _notify_neighbours(self, membership: RoleMembership) -> None:
        """A role became complete or was lost: notify its parent or the state machine, and synchronise its child."""
        role, state = membership.role, _state_of(membership)
        if role in self._lead_roles:
            self._apply_record(state)
        else:
            self._send_to_parent(role, state)
        child = None if role == "target" else self._memberships.get(child_role(role))
        if child is None:
            return
        if membership.is_complete:  # new ranks do not know whether the child level is complete
            self._hub.send(membership.links, _state_of(child))
        elif child.serving:  # the child holds requests of the lost level: start it anew
            child.start_new_epoch(self._awake_s)
            self._follow(child)

    def _send_to_parent(self, level: str, record: ProposalBatch | RoleBack | RoleLost) -> None:
        """Send a record to the role that this level of a cascade drafts for."""
        parent = parent_role(level)
        assert parent is not None
        self._hub.send(self._memberships[parent].links, record)

    def _start(self) -> None:
        """Create the state machine: at first once every role is complete, a successor as soon as the target is."""
        spec = self._spec
        target = self._memberships["target"]
        needed = [target] if spec.incarnation or spec.lent_silence_s else [*self._memberships.values()]
        if self._coordinator is not None or not self._has_client or not all(role.is_complete for role in needed):
            return
        (facts,) = [ready.facts for ready in target.ready() if ready.rank == 0]
        max_model_len, max_source_len = int(facts["max_model_len"]), int(facts.get("max_source_len", 0))
        self._checks.vocab_size, self._checks.max_model_len = int(facts["vocab_size"]), max_model_len
        self._checks.max_source_len = max_source_len
        self._hub.limit_clients(LONGEST_FIELDS + TOKEN_BYTES * (2 * max_model_len + max_source_len))
        policy = make_policy(
            spec.pipeline,
            spec.min_draft_tokens,
            spec.num_draft_tokens,
            adaptive=spec.adaptive,
            longest_only=spec.chooses_lengths,
            scores=spec.scores_drafts,
            runs_passes=spec.runs_passes,
            waits=spec.local_drafter == "none",
            rounds_at_once=ROUNDS_AT_ONCE if spec.attached else 1,
        )
        drafter = open_port(
            policy,
            spec.limits.prefill_chunk,
            drafts="draft" in self._memberships,
            attached=spec.attached,
            bridged=spec.bridged,
            num_seats=spec.num_seats,
            first_round=spec.incarnation * ROUNDS_PER_INCARNATION,
            local_drafter=spec.local_drafter,
        )
        block_size, whole_texts = int(facts.get("block_size", 0)), bool(facts.get("whole_texts"))
        capacity = Capacity(int(facts["kv_slots"]), max_model_len, block_size, whole_texts)
        scheduler = Scheduler(spec.limits, capacity)
        self._coordinator = Coordinator(
            scheduler,
            policy,
            spec.eos_token_ids,
            drafter,
            weights=spec.weights,
            now=time.monotonic(),
        )
        self._send_ready(self._memberships, self._clients.connected())
        for role in self._lead_roles:
            membership = self._memberships.get(role)
            if membership is not None and (spec.bridged or not membership.is_complete):
                self._apply_record(_state_of(membership))

    def _send_ready(self, roles: Iterable[str], clients: Sequence[str]) -> None:
        """Send these clients what the ranks of these roles measured at start."""
        for role in roles:
            for ready in self._memberships[role].ready():
                self._hub.send(clients, ready)
