"""Continuous batching: which sequences take part in the next target pass, and with how many rows.

A pure state machine over lengths; it never sees a tensor, a socket or a clock. Requests join and leave between
rounds, long prompts are fed in chunks, and when the KV pool runs short the youngest sequences first lose their
draft tokens and then their place: they go back to the front of the queue and are recomputed later, with the same
tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from actors.coordinator.sequence import Sequence
from actors.options import SchedulerConfig
from actors.protocol.messages import Proposal


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the target can hold: token slots in its KV pool, and positions one sequence may reach."""

    kv_slots: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Load:
    """How full the engine is; a slot is the KV of one token of a running sequence."""

    num_running: int
    num_waiting: int
    kv_slots_used: int
    kv_slots: int


@dataclass(slots=True)
class PassPlan:
    """Rows per sequence for the next pass, and what had to happen to make room for them."""

    rows: list[tuple[Sequence, int, Proposal | None]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns the waiting queue and the running list (oldest first)."""

    def __init__(self, limits: SchedulerConfig, capacity: Capacity) -> None:
        self.limits = limits
        self.capacity = capacity
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def refusal(self, sequence: Sequence) -> str | None:
        """One line why this request can never run, or None."""
        longest = sequence.prompt_len + sequence.request.sampling.max_tokens
        if sequence.prompt_len == 0:
            return "prompt: is empty; give at least one token"
        if sequence.prompt_len >= self.capacity.max_model_len:
            return (
                f"prompt: {sequence.prompt_len} tokens do not fit the context of {self.capacity.max_model_len}; "
                "shorten it or raise target.max_model_len"
            )
        if min(longest, self.capacity.max_model_len) > self.capacity.kv_slots:
            return (
                f"prompt: {longest} tokens (prompt and sampling.max_tokens) do not fit {self.capacity.kv_slots} "
                "KV slots; raise target.kv_slots or lower sampling.max_tokens"
            )
        return None

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended, wherever it was."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def preempt_all(self) -> list[Sequence]:
        """The target is gone, and all rows with it: everybody goes back to the front of the queue, oldest first."""
        victims, self.running = self.running, []
        for victim in reversed(victims):
            victim.preempt()
            self.waiting.appendleft(victim)
        return victims

    @property
    def num_requests(self) -> int:
        return len(self.running) + len(self.waiting)

    def load(self) -> Load:
        used = sum(sequence.cached_len for sequence in self.running)
        return Load(len(self.running), len(self.waiting), used, self.capacity.kv_slots)

    def _admit(self, plan: PassPlan) -> None:
        """Move waiting sequences into the batch while seats, rows and slots last."""
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            promised = sum(other.prefix_len + 1 for other in self.running)
            if self.running and promised + sequence.prefix_len + 1 > self.capacity.kv_slots:
                return
            self.running.append(self.waiting.popleft())
            plan.admitted.append(sequence)

    def plan(self, proposals: dict[int, Proposal], held: Collection[int] = ()) -> PassPlan:
        """Choose the rows of the next pass: `proposals` maps request ids to fresh proposals, `held` sit it out."""
        plan = PassPlan()
        self._admit(plan)
        demands = self._demands(proposals, held)
        self._fit(demands, plan)
        plan.rows = [(sequence, rows, proposal) for sequence, rows, proposal in demands if rows]
        return plan

    def _demands(
        self, proposals: dict[int, Proposal], held: Collection[int]
    ) -> list[tuple[Sequence, int, Proposal | None]]:
        budget = self.limits.max_num_batched_tokens
        # Sequences that only lack their root come first: neither a long prompt nor another's draft may stall them.
        queue = sorted((s for s in self.running if s.request_id not in held), key=lambda s: s.uncached_len > 1)
        num_roots = sum(sequence.uncached_len == 1 for sequence in queue)
        demands = []
        for place, sequence in enumerate(queue, start=1):
            rows = min(sequence.uncached_len, self.limits.prefill_chunk, budget)
            budget -= rows
            proposal = proposals.get(sequence.request_id) if rows == sequence.uncached_len else None
            if _num_draft_tokens(proposal) > budget - max(0, num_roots - place):
                proposal = None
            budget -= _num_draft_tokens(proposal)
            demands.append((sequence, rows, proposal))
        return demands

    def _fit(self, demands: list[tuple[Sequence, int, Proposal | None]], plan: PassPlan) -> None:
        """Shrink `demands` in place until they fit the pool: the oldest sequence alone always does."""
        free = self.capacity.kv_slots - sum(sequence.cached_len for sequence in self.running)
        needed = sum(rows + _num_draft_tokens(proposal) for _, rows, proposal in demands)
        for i in range(len(demands) - 1, -1, -1):
            if needed <= free:
                return
            sequence, rows, proposal = demands[i]
            needed -= _num_draft_tokens(proposal)
            demands[i] = (sequence, rows, None)
        while needed > free:
            victim = self.running.pop()
            needed -= sum(rows for sequence, rows, _ in demands if sequence is victim)
            demands[:] = [demand for demand in demands if demand[0] is not victim]
            free += victim.cached_len
            victim.preempt()
            self.waiting.appendleft(victim)
            plan.preempted.append(victim)


def _num_draft_tokens(proposal: Proposal | None) -> int:
    return proposal.tree.num_draft_tokens if proposal else 0
