"""A target replica on the virtual clock: the engine's own coordinator, its target's lane, and what drafts for it.

A cell is one incarnation: a lost target is replaced by another cell, and what still arrives for the old one is dropped.
It must not know regions, pools or clients: records for them leave through the calls that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

from actors.coordinator.port import open_port
from actors.coordinator.scheduler import Capacity, Scheduler
from actors.coordinator.state_machine import Coordinator
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import SchedulerConfig
from actors.policy.policy import make_policy
from actors.protocol.membership import RoleBack, RoleLost
from actors.protocol.messages import DraftBatch, Tokens, VerifyBatch
from cluster.tools.fleet.description import Fleet
from cluster.tools.fleet.layouts import Drafting
from cluster.tools.simulation.clock import ARRIVAL, CoordinatorLane, LaneClock, RoleLane, VirtualClock
from cluster.tools.simulation.roles import ScriptedRunner, ScriptedTarget, TextOf, draft_role

MOST_POSITIONS = 1 << 20
"""Tokens of a text: scripted models have room for any."""


def drafter_config(fleet: Fleet) -> ModelDrafterConfig:
    drafter = fleet.drafter
    return ModelDrafterConfig(
        num_draft_tokens=drafter.longest_draft, fan_out=drafter.fan_out, ahead_width=drafter.ahead_width
    )


class CellClients(Protocol):
    """Where tokens go, and the text that the target writes for each request."""

    text_of: TextOf

    def emit(self, cell: Cell, tokens: Tokens) -> None: ...


class Cell:
    """A cell whose drafter is elsewhere decodes plainly until `attach`, and after `detach`."""

    def __init__(
        self,
        fleet: Fleet,
        drafting: Drafting,
        clock: VirtualClock,
        clients: CellClients,
        region: str,
    ) -> None:
        self.region = region
        self._clock = clock
        self._clients = clients
        self._link_s = fleet.links.local_ms / 1e3
        pipeline = {Drafting.plain: "plain", Drafting.attached: "sync"}.get(drafting, fleet.pipeline)
        policy = make_policy(pipeline, 0, fleet.drafter.longest_draft, adaptive=fleet.adaptive)
        limits = SchedulerConfig(max_num_seqs=fleet.target.max_num_seqs, prefix_cache=False)
        port = open_port(policy, limits.prefill_chunk, drafts=drafting is not Drafting.plain)
        capacity = Capacity(fleet.target.kv_slots, MOST_POSITIONS)
        coordinator = Coordinator(Scheduler(limits, capacity), policy, (), port, now=clock.now)
        self.lane = CoordinatorLane(coordinator, clock, self._send, fleet.coordinator_ms / 1e3)
        self._send_drafter: Callable[[DraftBatch], None] | None = None
        self._epoch = 0
        self.target = self._target_lane(fleet, drafting, clients.text_of)
        if drafting is Drafting.pools:
            self.lane.take(RoleLost("draft"))

    def _target_lane(self, fleet: Fleet, drafting: Drafting, text_of: TextOf) -> RoleLane:
        """Makes the target's lane; with attached drafts both roles share it: while one computes, the other waits."""
        time, send = LaneClock(), partial(self.lane.receive, delay_s=self._link_s)
        target = ScriptedTarget(text_of, time, fleet.target.passes)
        if drafting is not Drafting.attached:
            return RoleLane(self._clock, time, target.answer, send)
        runner = ScriptedRunner(text_of, time, fleet.drafter.attached_passes, MOST_POSITIONS)
        role = draft_role("sync", drafter_config(fleet), runner, time, adapts=False)

        def answer(record: VerifyBatch | DraftBatch) -> Iterator[Any]:
            return target.answer(record) if isinstance(record, VerifyBatch) else role.answer(record)

        lane = RoleLane(self._clock, time, answer, send)
        self._send_drafter = lambda batch: self._clock.at(
            self._clock.now + self._link_s, ARRIVAL, partial(lane.receive, batch)
        )
        return lane

    @property
    def has_drafter(self) -> bool:
        return self._send_drafter is not None

    @property
    def busy_s(self) -> float:
        """Seconds in which the target's ranks have computed so far."""
        return sum([end - start for start, end in self.target.busy])

    def attach(self, send: Callable[[DraftBatch], None]) -> None:
        """A drafter serves from now on; it knows no request."""
        self._send_drafter = send
        self._epoch += 1
        self.lane.take(RoleBack("draft", self._epoch))

    def detach(self) -> None:
        """The drafter is lost."""
        self._send_drafter = None
        self.lane.take(RoleLost("draft"))

    def _send(self, answers: Iterable[Any]) -> None:
        now = self._clock.now
        for answer in answers:
            match answer:
                case VerifyBatch():
                    self._clock.at(now + self._link_s, ARRIVAL, partial(self.target.receive, answer))
                case DraftBatch() if self._send_drafter is not None:
                    self._send_drafter(answer)
                case Tokens():
                    assert answer.error is None, answer.error
                    self._clients.emit(self, answer)
