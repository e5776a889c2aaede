"""The ranks of one role: which are alive, which epoch they are in, and what to order until all of them are in it.

A pure state machine over heartbeats. Every failure in a role, a rank that died or hangs, a record that was lost, a new
coordinator, has one remedy: all ranks leave their epoch and, once the last of them waits, join the next one. Orders are
repeated until they are followed, so any record may be lost.

    gathering --(all ranks wait: Join)--> joining --(all are Ready)--> serving
        ^----------(one is new, lost, or has left: Recall)----------------/
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from actors.protocol.membership import HEARTBEAT_S, Alive, Join, Ready, Recall, Silent, identity_of
from actors.transport.channel import link_name

REPEAT_S = 0.3
"""Interval at which an order that was not followed is repeated."""
RECALL_LIMIT_S = 30.0
"""A rank that sends heartbeats but has not followed a recall for so long is stuck in its work."""
MISSED_BEATS = 3
"""Heartbeats in a row in which a rank does not work on its batch, after which the batch is taken to be lost."""

Orders = list[tuple[list[int], Recall | Join]]
"""Records to send, and the ranks they are for."""


class Phase(Enum):
    gathering = 0
    joining = 1
    serving = 2


@dataclass(slots=True)
class _Rank:
    """`at` is when the last heartbeat came, or the rank was lost or reported silent.

    `joined` is the last epoch that its process was part of; a heartbeat that says it waits for an earlier one is old.
    `idle` is (round, heartbeats in a row that did not work on it), `busy` (round, heartbeats in a row that did).
    """

    last: Alive | None = None
    at: float = 0.0
    oldest: int = 0  # records of incarnations before this one are ignored
    ready: Ready | None = None
    joined: int = 0
    idle: tuple[int, int] = (0, 0)
    busy: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class RoleMembership:
    """`epoch` is the present one, or the next while ranks gather. Times are seconds on any one clock."""

    role: str
    size: int
    epoch: int = 1
    phase: Phase = Phase.gathering
    _ranks: list[_Rank] = field(default_factory=list)
    _since: float = 0.0
    _ordered_at: float = -REPEAT_S
    _links: list[str] | None = None  # of all ranks, lead first; None after a change

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in range(self.size)]

    @property
    def serving(self) -> bool:
        return self.phase is Phase.serving

    def links(self, ranks: Iterable[int] | None = None) -> list[str]:
        """Links of the processes that are these ranks, by default all ranks; those that are not known are left out."""
        if ranks is not None:
            return [self._link(rank) for rank in ranks if self._ranks[rank].last is not None]
        if self._links is None:
            self._links = self.links(range(self.size))
        return self._links

    def _link(self, rank: int) -> str:
        last = self._ranks[rank].last
        assert last is not None
        return link_name(identity_of(self.role, rank), last.incarnation)

    def ready(self) -> list[Ready]:
        return [rank.ready for rank in self._ranks if rank.ready is not None]

    # --- events -------------------------------------------------------------------------------------------------------

    def beat(self, alive: Alive, now: float) -> bool:
        """A heartbeat came; returns False if it is of a process that was replaced."""
        rank = self._ranks[alive.rank]
        if alive.incarnation < rank.oldest:
            return False
        is_new = rank.last is None or alive.incarnation > rank.last.incarnation
        if is_new:
            rank.joined, rank.busy = 0, (0, 0)
            self._links = None
        rank.at, rank.oldest = now, alive.incarnation
        if alive.waiting and alive.epoch < rank.joined:
            return True
        rank.last = alive
        if not alive.at_change:
            round_before, beats = rank.busy
            rank.busy = (alive.round, beats + 1 if alive.busy and round_before == alive.round else 0)
        has_left = alive.waiting and alive.epoch >= self.epoch
        if self.phase is not Phase.gathering and (is_new or has_left):
            self.start_new_epoch(now)
        return True

    def joined(self, ready: Ready) -> None:
        if ready.epoch != self.epoch or self.phase is Phase.gathering:
            return
        rank = self._ranks[ready.rank]
        if rank.last is None:
            return
        rank.ready, rank.joined, rank.last = ready, ready.epoch, replace(rank.last, waiting=False)
        if all(rank.ready is not None for rank in self._ranks):
            self.phase = Phase.serving

    def lose(self, rank: int, incarnation: int, now: float) -> None:
        """The process of this rank has ended."""
        lost = self._ranks[rank]
        if incarnation < lost.oldest:
            return
        lost.last, lost.oldest, lost.at, self._links = None, incarnation + 1, now, None
        if self.phase is not Phase.gathering:
            self.start_new_epoch(now)

    def start_new_epoch(self, now: float) -> None:
        """End this epoch for all ranks."""
        self.epoch += 1
        self.phase, self._since, self._ordered_at = Phase.gathering, now, now - REPEAT_S
        for rank in self._ranks:
            rank.ready, rank.idle = None, (0, 0)

    # --- orders -------------------------------------------------------------------------------------------------------

    def orders(self, last_round: int, store: tuple[str, int] | None, now: float) -> Orders:
        """What to send the ranks now; `last_round` is that of the last batch that the role was sent."""
        if self.phase is Phase.gathering and all(rank.last is not None and rank.last.waiting for rank in self._ranks):
            self.phase, self._ordered_at = Phase.joining, now - REPEAT_S
        if self.phase is Phase.serving or now - self._ordered_at < REPEAT_S:
            return []
        self._ordered_at = now
        if self.phase is Phase.joining:
            absent = [i for i, rank in enumerate(self._ranks) if rank.ready is None]
            return [(absent, Join(self.epoch, last_round, store))]
        busy = [i for i, rank in enumerate(self._ranks) if rank.last is not None and not rank.last.waiting]
        return [(busy, Recall(self.epoch))] if busy else []

    def silent(self, limit_s: float, now: float, round_limit_s: float = math.inf) -> list[Silent]:
        """Ranks that hang; they are lost from now on. A rank without a process is reported again every `limit_s`.

        A rank hangs if it sent no heartbeat for `limit_s` (0: not checked), or was recalled in vain, or if its round
        takes longer than `round_limit_s`, counted in its own heartbeats, which a host that is overloaded delays too.
        """
        named = []
        for number, rank in enumerate(self._ranks):
            is_silent = bool(limit_s) and now - rank.at > limit_s
            if rank.last is None and is_silent:
                named.append(Silent(self.role, number))
                rank.at = now
            elif rank.last is not None and (is_silent or self._is_stuck(rank, now, round_limit_s)):
                named.append(Silent(self.role, number, rank.last.incarnation, rank.last.pid))
                self.lose(number, rank.last.incarnation, now)
        return named

    def _is_stuck(self, rank: _Rank, now: float, round_limit_s: float) -> bool:
        """Whether this rank sends heartbeats but its work does not go on."""
        if rank.busy[1] * HEARTBEAT_S > round_limit_s:
            return True
        is_recalled_in_vain = rank.last is not None and not rank.last.waiting and rank.last.epoch > 0
        return self.phase is Phase.gathering and now - self._since > RECALL_LIMIT_S and is_recalled_in_vain

    def has_missed(self, alive: Alive, awaited: int | None) -> bool:
        """Whether this rank never got the batch of round `awaited`, which it should be working on.

        A single heartbeat proves nothing: it may have crossed the batch, or the answer.
        """
        rank = self._ranks[alive.rank]
        if awaited is None or not self.serving or alive.at_change:
            return False
        is_idle = alive.round < awaited or (alive.rank == 0 and not alive.busy)
        round_before, beats = rank.idle
        rank.idle = (awaited, (beats if round_before == awaited else 0) + 1 if is_idle else 0)
        return rank.idle[1] >= MISSED_BEATS
