"""The ranks of one role: who is there, which epoch they are in, and what to tell them until all of them are in it.

A pure state machine over heartbeats. Whatever goes wrong in a role, a rank that died or hangs, a record that was
lost, a coordinator that knows nobody yet, has one remedy: all ranks leave their epoch and, once the last of them
waits, join the next one. Everything it says is said again until it is followed, so any of it may be lost.

    gathering --(all ranks wait: Join)--> joining --(all are Ready)--> serving
        ^----------(one is new, lost, or has left: Recall)----------------/
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from actors.protocol.membership import HEARTBEAT_S, Alive, Join, Ready, Recall, Silent

REPEAT_S = 0.3
"""How soon what was not followed is said again."""
RECALL_LIMIT_S = 30.0
"""A rank that lives but does not come back for so long is stuck where nobody can reach it."""
DOUBTFUL_BEATS = 3
"""So many heartbeats in a row in which a rank does not work on what it was sent: it never got it."""

Orders = list[tuple[list[int], Recall | Join]]
"""What to say, and to which ranks."""


class Phase(Enum):
    gathering = 0
    joining = 1
    serving = 2


@dataclass(slots=True)
class _Rank:
    """What is known of one rank; `at` is when it was last heard of, lost, or said to be silent.

    `joined` is the last epoch its process was part of: that it waited before is old news. `idle` counts beats that
    raise doubts, and `busy` those within one round, each behind the round they are about.
    """

    last: Alive | None = None
    at: float = 0.0
    oldest: int = 0  # incarnations before this one are dead, whatever they may still say
    ready: Ready | None = None
    joined: int = 0
    idle: tuple[int, int] = (0, 0)
    busy: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class RoleMembership:
    """`epoch` is the one that is gathered for, or served in. Times are seconds on any one clock."""

    role: str
    size: int
    epoch: int = 1
    phase: Phase = Phase.gathering
    _ranks: list[_Rank] = field(default_factory=list)
    _since: float = 0.0
    _said: float = -REPEAT_S

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in range(self.size)]

    @property
    def serving(self) -> bool:
        return self.phase is Phase.serving

    def incarnation(self, rank: int) -> int | None:
        """Of the process that plays this rank now; None while nobody is known to."""
        last = self._ranks[rank].last
        return None if last is None else last.incarnation

    def ready(self) -> list[Ready]:
        return [rank.ready for rank in self._ranks if rank.ready is not None]

    # --- what happens -------------------------------------------------------------------------------------------------

    def hear(self, alive: Alive, now: float) -> bool:
        """A heartbeat; False if it is that of a process which was replaced."""
        rank = self._ranks[alive.rank]
        if alive.incarnation < rank.oldest:
            return False
        is_new = rank.last is None or alive.incarnation > rank.last.incarnation
        if is_new:
            rank.joined, rank.busy = 0, (0, 0)
        rank.at, rank.oldest = now, alive.incarnation
        if alive.waiting and alive.epoch < rank.joined:
            return True
        rank.last = alive
        if not alive.at_change:
            round_before, beats = rank.busy
            rank.busy = (alive.taken, beats + 1 if alive.busy and round_before == alive.taken else 0)
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
        """This process is no more."""
        lost = self._ranks[rank]
        if incarnation < lost.oldest:
            return
        lost.last, lost.oldest, lost.at = None, incarnation + 1, now
        if self.phase is not Phase.gathering:
            self.start_new_epoch(now)

    def start_new_epoch(self, now: float) -> None:
        """This epoch is over for all ranks."""
        self.epoch += 1
        self.phase, self._since, self._said = Phase.gathering, now, now - REPEAT_S
        for rank in self._ranks:
            rank.ready, rank.idle = None, (0, 0)

    # --- what follows -------------------------------------------------------------------------------------------------

    def orders(self, last_round: int, store: tuple[str, int] | None, now: float) -> Orders:
        """What the ranks have to be told now; `last_round` is that of the last batch the role was sent."""
        if self.phase is Phase.gathering and all(rank.last is not None and rank.last.waiting for rank in self._ranks):
            self.phase, self._said = Phase.joining, now - REPEAT_S
        if self.phase is Phase.serving or now - self._said < REPEAT_S:
            return []
        self._said = now
        if self.phase is Phase.joining:
            absent = [i for i, rank in enumerate(self._ranks) if rank.ready is None]
            return [(absent, Join(self.epoch, last_round, store))]
        busy = [i for i, rank in enumerate(self._ranks) if rank.last is not None and not rank.last.waiting]
        return [(busy, Recall(self.epoch))] if busy else []

    def silent(self, limit_s: float, now: float, round_limit_s: float = math.inf) -> list[Silent]:
        """Who hangs; it is lost from now on, and of a rank that nobody plays it is said again every `limit_s`.

        Ranks not heard of for `limit_s` (0: never mind), those whose round does not end within `round_limit_s`,
        counted in their own heartbeats so that a starved process is not blamed, and those recalled in vain.
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
        """Whether the heart of this rank beats, and nothing else of it moves."""
        if rank.busy[1] * HEARTBEAT_S > round_limit_s:
            return True
        is_recalled_in_vain = not rank.last.waiting and rank.last.epoch > 0
        return self.phase is Phase.gathering and now - self._since > RECALL_LIMIT_S and is_recalled_in_vain

    def doubts(self, alive: Alive, awaited: int | None) -> bool:
        """Whether beat after beat this rank does not work on round `awaited`, for which everybody waits.

        A single such beat means nothing: it may have crossed the order, or the answer, on its way.
        """
        rank = self._ranks[alive.rank]
        if awaited is None or not self.serving or alive.at_change:
            return False
        is_idle = alive.taken < awaited or (alive.rank == 0 and not alive.busy)
        round_before, beats = rank.idle
        rank.idle = (awaited, (beats if round_before == awaited else 0) + 1 if is_idle else 0)
        return rank.idle[1] >= DOUBTFUL_BEATS
