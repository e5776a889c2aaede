"""The ranks of one role: which are alive, which epoch each is in, and the orders that bring all of them into one epoch.

A pure state machine over heartbeats. Every failure (a rank that died or hangs, a lost record, a new coordinator) has
the same remedy: all ranks leave their epoch and, once all of them wait, join the next one. An order is repeated until
the heartbeats show its effect, so any record may be lost. A rank hangs whose heartbeats cease, or whose round takes far
longer than those before.

    gathering --(all ranks wait: Join)--> joining --(all are Ready)--> serving
        ^-------(a rank is new, lost, or has left: Recall)---------------/
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from actors.protocol.membership import HEARTBEAT_S, Alive, Join, Ready, Recall, Silent, Weights, identity_of
from actors.protocol.messages import DraftBatch, ProposalBatch, VerdictBatch, VerifyBatch
from actors.transport.channel import link_name

REPEAT_S = 0.3
"""Seconds between repetitions of an order whose effect has not been seen."""
RECALL_LIMIT_S = 30.0
"""Seconds from a `Recall` after which a rank that sends heartbeats but has not left its epoch counts as hanging."""
MISSED_BEATS = 3
"""Consecutive heartbeats of a rank that does not work on its batch, after which the batch counts as lost."""
FLOOR_S = 30.0
"""The part of a round's limit that does not depend on measured rounds."""
FACTOR = 20.0
"""The other part, in longest rounds so far."""
IDLE_S = 2e-4
"""A drafter that starts an order this long after its last pass was idle when the order arrived."""
MOST_UNREAD = 64
"""Batches and answers of a role that are kept until it is asked for what they show."""

Orders = list[tuple[list[int], Recall | Join]]
"""Records to send, and the ranks they are for."""


class Phase(Enum):
    gathering = 0
    joining = 1
    serving = 2


class RoleRounds:
    """The rounds of a role, from a batch to its answer: how long one may take, and how long records are on their way.

    Batches and answers are kept as they come, and looked at once it is asked for what they show. One that takes longer
    than `limit_s` is taken to hang; without a measured round there is no limit, since the first may compile, allocate,
    or read a prompt on a machine of any speed.
    """

    def __init__(self) -> None:
        self._unread: list[tuple[VerifyBatch | DraftBatch | VerdictBatch | ProposalBatch, float]] = []
        self._longest_s = 0.0
        self._most_rows = 0  # the most tokens of a round
        self._rows = 0  # tokens that the largest of the unanswered batches makes the role read, verify or draft
        self._loads = False
        self._sent: tuple[int, float] = (0, 0.0)  # round of the batch without any answer, and when it left
        self._trips_s: list[float] = []

    def ordered(self, batch: VerifyBatch | DraftBatch, now: float) -> None:
        """The role was sent this batch."""
        self._unread.append((batch, now))

    def answered(self, answer: VerdictBatch | ProposalBatch, now: float) -> None:
        """It has answered, or in part."""
        self._unread.append((answer, now))
        if len(self._unread) >= MOST_UNREAD:
            self._read()

    def take_trips(self) -> list[float]:
        """The seconds for which batches and their answers were on their way, since the last call."""
        self._read()
        taken, self._trips_s = self._trips_s, []
        return taken

    @property
    def limit_s(self) -> float:
        """Limit of the present round, in proportion if it has more rows than any that was measured."""
        self._read()
        if not self._most_rows or self._loads:
            return math.inf
        return FLOOR_S + FACTOR * self._longest_s * max(1.0, self._rows / self._most_rows)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for record, at in unread:
            if isinstance(record, VerifyBatch | DraftBatch):
                self._read_order(record, at)
            else:
                self._read_answer(record, at)

    def _read_order(self, batch: VerifyBatch | DraftBatch, now: float) -> None:
        """Unanswered batches count as the largest of them. Weights may take any time."""
        self._sent, rows = (batch.round, now), 0
        if isinstance(batch, VerifyBatch):
            self._loads = batch.weights is not None
            for item in batch.items:
                rows += item.num_tokens
                if item.proposal is not None:
                    rows += item.proposal.tree.num_draft_tokens
        else:
            for record in (*batch.admits, *batch.commits):
                rows += len(record.token_ids)
            for order in batch.orders:
                rows += order.num_draft_tokens
        self._rows = max(self._rows, rows, 1)

    def _read_answer(self, answer: VerdictBatch | ProposalBatch, now: float) -> None:
        """It tells how long the records were on their way if it is the first answer to a batch, unless this had to wait
        for a pass of draft-ahead, or the target's pass was made ahead of it."""
        (round_, sent_at), self._sent = self._sent, (0, 0.0)
        if self._loads:
            self._loads, self._rows = False, 0
        if self._rows:
            self._longest_s = max(self._longest_s, answer.finished - answer.started)
            self._most_rows, self._rows = max(self._most_rows, self._rows), 0
        if isinstance(answer, VerdictBatch):
            was_idle, left_at = not (answer.ran_ahead or answer.dropped_s), answer.left_at
        else:
            was_idle = not answer.ahead or answer.started - answer.ahead[-1][1] > IDLE_S
            left_at = answer.finished
        if answer.round == round_ and was_idle:
            self._trips_s.append(max(0.0, now - sent_at - (left_at - answer.started)))


@dataclass(slots=True)
class _Rank:
    """`heartbeat` is the last one, None without a process.

    `last_event_s` is when it came, or when the rank was lost or reported as hanging. `joined_epoch` is the last epoch
    of its process; a heartbeat that waits in an earlier epoch was sent before the join and is ignored. `idle_beats` and
    `busy_beats` are (round, consecutive heartbeats without or with work on it).
    """

    heartbeat: Alive | None = None
    last_event_s: float = 0.0
    min_incarnation: int = 0  # records of earlier incarnations are ignored
    ready: Ready | None = None
    joined_epoch: int = 0
    idle_beats: tuple[int, int] = (0, 0)
    busy_beats: tuple[int, int] = (0, 0)
    idle_at: float = -math.inf
    """When the last of `idle_beats` was counted."""


@dataclass(slots=True)
class RoleMembership:
    """`epoch` is the present one, or the next while ranks gather. Times are seconds on the clock of `now`. Ranks that
    join serve `weights`, if they are named. `rounds` are those of the role, and `is_complete` says what its neighbours
    know of it: that it serves."""

    role: str
    size: int
    epoch: int = 1
    phase: Phase = Phase.gathering
    weights: Weights | None = None
    rounds: RoleRounds = field(default_factory=RoleRounds)
    is_complete: bool = False
    links: list[str] = field(default_factory=list)
    """Those of all ranks that have a known process, lead first."""
    _ranks: list[_Rank] = field(default_factory=list)
    _since: float = 0.0
    _ordered_at: float = -REPEAT_S

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in range(self.size)]

    @property
    def serving(self) -> bool:
        return self.phase is Phase.serving

    def links_of(self, ranks: Iterable[int]) -> list[str]:
        """Links of these ranks; those without a known process are left out."""
        last = [(rank, self._ranks[rank].heartbeat) for rank in ranks]
        return [link_name(identity_of(self.role, rank), one.incarnation) for rank, one in last if one is not None]

    @property
    def bridge(self) -> int:
        """Number of the bridge at whose end the lead is, by its last heartbeat."""
        lead = self._ranks[0].heartbeat
        return 0 if lead is None else lead.bridge

    def ready(self) -> list[Ready]:
        return [rank.ready for rank in self._ranks if rank.ready is not None]

    # --- events -------------------------------------------------------------------------------------------------------

    def record_heartbeat(self, alive: Alive, now: float) -> bool:
        """Update a rank; returns False for a heartbeat of a process that was replaced, which is ignored."""
        rank = self._ranks[alive.rank]
        if alive.incarnation < rank.min_incarnation:
            return False
        is_new = rank.heartbeat is None or alive.incarnation > rank.heartbeat.incarnation
        if is_new:
            rank.joined_epoch, rank.busy_beats = 0, (0, 0)
        rank.last_event_s, rank.min_incarnation = now, alive.incarnation
        if alive.waiting and alive.epoch < rank.joined_epoch:
            return True
        rank.heartbeat = alive
        if is_new:
            self.links = self.links_of(range(self.size))
        if not alive.off_schedule:
            round_before, beats = rank.busy_beats
            rank.busy_beats = (alive.round, beats + 1 if alive.busy and round_before == alive.round else 0)
        has_left = alive.waiting and alive.epoch >= self.epoch
        if self.phase is not Phase.gathering and (is_new or has_left):
            self.start_new_epoch(now)
        return True

    def record_ready(self, ready: Ready) -> None:
        """A rank has joined; once all have, the role serves. Ignored if it is of another epoch."""
        if ready.epoch != self.epoch or self.phase is Phase.gathering:
            return
        rank = self._ranks[ready.rank]
        if rank.heartbeat is None:
            return
        rank.ready, rank.joined_epoch, rank.heartbeat = ready, ready.epoch, replace(rank.heartbeat, waiting=False)
        if all(rank.ready is not None for rank in self._ranks):
            self.phase = Phase.serving

    def mark_lost(self, rank: int, incarnation: int, now: float) -> None:
        """The process of this rank has ended."""
        lost = self._ranks[rank]
        if incarnation < lost.min_incarnation:
            return
        lost.heartbeat, lost.min_incarnation, lost.last_event_s = None, incarnation + 1, now
        self.links = self.links_of(range(self.size))
        if self.phase is not Phase.gathering:
            self.start_new_epoch(now)

    def start_new_epoch(self, now: float) -> None:
        """End the present epoch for all ranks and gather them for the next."""
        self.epoch += 1
        self.phase, self._since, self._ordered_at = Phase.gathering, now, now - REPEAT_S
        for rank in self._ranks:
            rank.ready, rank.idle_beats = None, (0, 0)

    # --- orders -------------------------------------------------------------------------------------------------------

    def orders(self, last_round: int, store: tuple[str, int] | None, now: float) -> Orders:
        """Orders that are due at `now`; `last_round` is the round of the last batch that was sent to the role."""
        is_waiting = [rank.heartbeat is not None and rank.heartbeat.waiting for rank in self._ranks]
        if self.phase is Phase.gathering and all(is_waiting):
            self.phase, self._ordered_at = Phase.joining, now - REPEAT_S
        if self.phase is Phase.serving or now - self._ordered_at < REPEAT_S:
            return []
        self._ordered_at = now
        if self.phase is Phase.joining:
            absent = [i for i, rank in enumerate(self._ranks) if rank.ready is None]
            return [(absent, Join(self.epoch, last_round, store, self.weights))]
        busy = [i for i, rank in enumerate(self._ranks) if rank.heartbeat is not None and not rank.heartbeat.waiting]
        return [(busy, Recall(self.epoch))] if busy else []

    def distrust(self, number: int, why: str, now: float) -> Silent:
        """Mark a rank that has a process lost; returns the report of it."""
        last = self._ranks[number].heartbeat
        assert last is not None
        self.mark_lost(number, last.incarnation, now)
        return Silent(self.role, number, last.incarnation, last.pid, why)

    def find_hanging(self, limit_s: float, now: float) -> list[Silent]:
        """Find ranks that hang, and mark them lost. A rank without a process is reported again every `limit_s` seconds.

        A rank hangs if it does not leave its epoch after a `Recall` or, unless `limit_s` is 0, if it sent no heartbeat
        for so long or its round takes longer than `rounds` may. Rounds are timed in the rank's own heartbeats, because
        an overloaded host delays both alike.
        """
        round_limit_s = self.rounds.limit_s if limit_s else math.inf
        hanging = []
        for number, rank in enumerate(self._ranks):
            is_silent = bool(limit_s) and now - rank.last_event_s > limit_s
            if rank.heartbeat is None and is_silent:
                hanging.append(Silent(self.role, number))
                rank.last_event_s = now
            elif rank.heartbeat is not None and (is_silent or self._is_stuck(rank, now, round_limit_s)):
                hanging.append(self.distrust(number, "hung", now))
        return hanging

    def _is_stuck(self, rank: _Rank, now: float, round_limit_s: float) -> bool:
        """Whether this rank sends heartbeats but makes no progress."""
        if rank.busy_beats[1] * HEARTBEAT_S > round_limit_s:
            return True
        ignores_recall = rank.heartbeat is not None and not rank.heartbeat.waiting and rank.heartbeat.epoch > 0
        return self.phase is Phase.gathering and now - self._since > RECALL_LIMIT_S and ignores_recall

    def suspects_missed_batch(self, alive: Alive, awaited: int | None, now: float) -> bool:
        """Whether this rank seems to have missed the batch of round `awaited`, or the coordinator its answer.

        It takes `MISSED_BEATS` heartbeats without work on that round: a single one may have crossed the batch or the
        answer on the way, and so may several that come at once, because the coordinator or the line stood still.
        """
        rank = self._ranks[alive.rank]
        if awaited is None or not self.serving or alive.off_schedule or now - rank.idle_at < HEARTBEAT_S / 2:
            return False
        rank.idle_at = now
        is_idle = not alive.busy and (alive.round < awaited or alive.rank == 0)
        round_before, beats = rank.idle_beats
        rank.idle_beats = (awaited, (beats if round_before == awaited else 0) + 1 if is_idle else 0)
        return rank.idle_beats[1] >= MISSED_BEATS
