"""Continuous batching: which sequences take part in the next target pass, and with how many rows.

A pure state machine over lengths; it never sees a tensor, a socket or a clock. Requests join and leave between rounds,
and long prompts are fed in chunks, smaller ones while other requests decode. Places are given to clients in turn
(`waiting.py`), and while several clients have requests, each has at most an even share of the places and of the rows of
text, even if some stay empty: a pass with less of one client is faster for the others. A client with more places or
slots than another gives some up for a request of that one. When the KV pool runs short, sequences first lose their
draft tokens, then the youngest of the client with the most slots its place, but never the oldest of all: they return to
the front of the queue and are recomputed later, with the same tokens. A request whose text begins as one does that the
target reads now waits until it can share the rows. A request with which a pass raised is tested in passes of its own,
so that the next failure shows whose it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from actors.coordinator.sequence import BLOCK, Sequence
from actors.coordinator.waiting import WaitingQueue
from actors.options import SchedulerConfig
from actors.protocol.messages import Proposal


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the target has room for, in tokens."""

    kv_slots: int
    max_model_len: int
    """Positions that one sequence may reach."""
    block_size: int = 0
    """Tokens of a block; 0 for a target that writes token by token."""
    whole_texts: bool = False
    """A sequence has slots for all tokens that it may reach from its admission on."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and KV in use; a slot is the KV of one token of a running sequence."""

    num_running: int
    num_waiting: int
    kv_slots_used: int
    kv_slots: int


class Demand(NamedTuple):
    """Rows of committed text that a sequence feeds in a pass, and the proposal that is verified after them."""

    sequence: Sequence
    num_rows: int
    proposal: Proposal | None

    @property
    def num_slots(self) -> int:
        """KV slots that the pass takes at most: rows that are shared with other requests count as if this one had slots
        of its own for them."""
        sequence = self.sequence
        if sequence.reserved_len:
            return 0
        num_draft_tokens = len(self.proposal.tree.token_ids) - 1 if self.proposal is not None else 0
        return (sequence.uncached_len if sequence.may_hit else self.num_rows) + num_draft_tokens


@dataclass(slots=True)
class RoundPlan:
    """Rows per sequence for the next pass, and the sequences that joined or lost their place."""

    rows: list[Demand] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


MOST_NEW = 4
"""Requests of one client that join in one pass while others have requests: to read a text, and to open and release a
request at every role, costs more than a row."""


WORTH_WAITING = BLOCK
"""Rows that a request waits for while another reads them."""


class Scheduler:
    """Owns the waiting queue and the running list (in the order of admission)."""

    def __init__(self, limits: SchedulerConfig, capacity: Capacity) -> None:
        self.limits = limits
        self.capacity = capacity
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []

    def refusal(self, sequence: Sequence) -> str | None:
        """One line why this request, which fits the context, can never run, or None."""
        longest = min(sequence.prompt_len + sequence.request.sampling.max_tokens, self.capacity.max_model_len)
        if self.capacity.block_size and (misfit := sequence.request.block_misfit()) is not None:
            return misfit
        if longest + sequence.source_len > self.capacity.kv_slots:
            name = "source" if sequence.source_len else "prompt"
            return (
                f"{name}: {longest + sequence.source_len} tokens ({name} and sampling.max_tokens) do not fit "
                f"{self.capacity.kv_slots} KV slots; raise target.kv_slots or lower sampling.max_tokens"
            )
        return None

    def add(self, sequence: Sequence) -> None:
        sequence.reserved_len = sequence.max_len * self.capacity.whole_texts
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended, running or waiting."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def preempt(self, sequences: Collection[Sequence]) -> list[Sequence]:
        """Running sequences return to the front of the queue, oldest first, to be read again."""
        victims = [sequence for sequence in self.running if sequence in sequences]
        self.running = [sequence for sequence in self.running if sequence not in sequences]
        for victim in victims:
            victim.preempt()
        self.waiting.put_back(victims)
        return victims

    def load(self) -> Load:
        used = sum([sequence.num_rows for sequence in self.running])
        return Load(len(self.running), len(self.waiting), used, self.capacity.kv_slots)

    @property
    def num_joining(self) -> int:
        """Waiting sequences for which there are places in the next pass."""
        if not self.waiting.size:
            return 0
        free = self.limits.max_num_seqs - len(self.running)
        if len(places := self._places()) == 1:
            return min(self.waiting.size, free)
        share = _share(self.limits.max_num_seqs, places)
        counts = self.waiting.counts.items()
        return min(free, sum([min(count, MOST_NEW, max(0, share - places[scope])) for scope, count in counts]))

    def plan(self, held: Collection[int] = (), most_text: Callable[[float], int | None] = lambda _: None) -> RoundPlan:
        """The rows of the next pass, with the proposals that the sequences hold; requests in `held` sit it out.

        While others decode, at most so many rows of text are read as `most_text` says to take a number of seconds;
        None: as many as fit.
        """
        plan = RoundPlan()
        if self.waiting.size:
            self._fill_batch(plan)
        most, roots, texts, tested, num_over = self.limits.max_num_batched_tokens, [], [], None, -self.capacity.kv_slots
        for sequence in self.running:
            (texts if sequence.reads_text else roots).append(sequence)
            if sequence.probation:
                tested = tested or sequence
            num_over += sequence.num_rows
        if tested is not None:
            self.running.remove(tested)
            self.running.insert(0, tested)  # of all it keeps its place
            held = {sequence.request_id for sequence in self.running[1:]}
        elif roots and texts and not self.capacity.block_size:
            bound = most_text(self.limits.text_pass_ms / 1e3)
            most = most if bound is None else min(most, bound)
        if held:
            roots = [sequence for sequence in roots if sequence.request_id not in held]
            texts = [sequence for sequence in texts if sequence.request_id not in held]
        demands = self._demands(roots, texts, most)
        if texts or num_over + self.limits.max_num_batched_tokens > 0:  # else the pool has room for any such pass
            for demand in demands:
                num_over += demand.num_slots
            if num_over > 0:
                self._fit(demands, num_over, plan)
        plan.rows = demands
        return plan

    # --- places in the batch ------------------------------------------------------------------------------------------

    @property
    def tested(self) -> Sequence | None:
        """The running sequence on probation, which has the next passes for itself."""
        for sequence in self.running:
            if sequence.probation:
                return sequence
        return None

    @property
    def candidates(self) -> list[Sequence]:
        """The running sequences of which the next pass is made."""
        return self.running if (tested := self.tested) is None else [tested]

    def _fill_batch(self, plan: RoundPlan) -> None:
        """Move waiting sequences into the batch while places, rows and slots last; one on probation alone."""
        blocked: dict[int, int] = {}  # clients whose next request does not fit, and the slots that each has
        while self.waiting.size and self.tested is None:
            without = [*self._full(self._places(), plan.admitted), *blocked]
            sequence = self.waiting.first(without, self._waits_for_rows)
            if sequence is None or (sequence.probation and plan.admitted):
                return
            scope = sequence.request.scope
            if blocked and self._slots_of_client(scope) + _slots_of(sequence) > min(blocked.values()):
                return  # a request that needs many slots is not overtaken by those of clients with more than its own
            victims = self._owed_room(sequence)
            if victims is None:
                blocked[scope] = self._slots_of_client(scope)
            else:
                self.waiting.take(sequence)
                self._vacate(victims, plan)
                self.running.append(sequence)
                plan.admitted.append(sequence)

    def _waits_for_rows(self, sequence: Sequence) -> bool:
        """Whether it could soon share many more rows than now, of a text that the target reads."""
        alike = [other for other in self.running if _may_share(sequence, other)]
        if not any(other.uncached_len > 1 for other in alike):
            return False
        common = [_num_common(sequence, other) for other in alike]
        present = max([min(length, other.cached_len) for length, other in zip(common, alike, strict=True)])
        return max(common) - present >= WORTH_WAITING

    def _places(self) -> Counter[int]:
        """Places in the batch of each client that has requests, running or waiting, by the weight of its requests."""
        places = Counter(dict.fromkeys(self.waiting.counts, 0))
        for sequence in self.running:
            places[sequence.request.scope] += sequence.weight
        return places

    def _full(self, places: Counter[int], admitted: Iterable[Sequence]) -> list[int]:
        """The clients that get no further place in this pass. One that is alone gets all there are."""
        if len(places) == 1:
            return []
        share = _share(self.limits.max_num_seqs, places)
        new = Counter([sequence.request.scope for sequence in admitted])
        return [scope for scope, weight in places.items() if weight >= share or new[scope] >= MOST_NEW]

    def _owed_room(self, sequence: Sequence) -> list[Sequence] | None:
        """The sequences that give up the place and the slots which this one needs; None if it has to wait."""
        staying = [*self.running]
        while staying:
            num_slots = sum([*map(_slots_of, staying), _slots_of(sequence)])
            if len(staying) >= self.limits.max_num_seqs:
                victim = _owed(sequence, staying, lambda other: other.weight)
            elif num_slots > self.capacity.kv_slots:
                victim = _owed(sequence, staying, _slots_of)
            else:
                break
            if victim is None:
                return None
            staying.remove(victim)
        return [other for other in self.running if other not in staying]

    def _slots_of_client(self, scope: int) -> int:
        """Slots of a client's running sequences."""
        return sum([_slots_of(sequence) for sequence in self.running if sequence.request.scope == scope])

    def _vacate(self, victims: Collection[Sequence], plan: RoundPlan) -> None:
        self.preempt(victims)
        plan.preempted += [victim for victim in victims if victim not in plan.admitted]
        plan.admitted = [sequence for sequence in plan.admitted if sequence not in victims]

    # --- rows of the pass ---------------------------------------------------------------------------------------------

    def _demands(self, roots: Series[Sequence], texts: Series[Sequence], most_text: int) -> list[Demand]:
        """Sequences that only lack their root come first: neither a long prompt nor another's draft may delay them."""
        budget, demands, num_left = self.limits.max_num_batched_tokens, list[Demand](), len(roots)
        for sequence in roots[:budget]:
            proposal = sequence.draft.proposal
            budget -= 1
            num_left -= 1
            if proposal is not None:
                num_draft_tokens = len(proposal.tree.token_ids) - 1
                if num_draft_tokens <= budget - num_left:
                    budget -= num_draft_tokens
                else:
                    proposal = None
            demands.append(Demand(sequence, 1, proposal))
        if texts:
            demands += self._text_demands(texts, budget, most_text)
        return demands

    def _text_demands(self, texts: Series[Sequence], budget: int, most_text: int) -> Iterator[Demand]:
        """So many rows are left for sequences that have text to read, and most of them for text."""
        places = self._places()
        left = dict.fromkeys(places, _share(most_text, places))  # rows of text that each client may still have
        for sequence in texts:
            if sequence.reads_source:  # all of it at once, however long it is
                if sequence.source_len >= budget and sequence is not texts[0]:
                    continue
                budget = max(1, budget - sequence.source_len)
            uncached_len, scope = sequence.uncached_len, sequence.request.scope
            rows = min(uncached_len, self.limits.prefill_chunk, budget)
            if uncached_len > 1:
                rows = min(rows, left[scope])
                left[scope] -= rows
            budget -= rows
            proposal = sequence.draft.proposal if rows == uncached_len else None
            if proposal is not None and len(proposal.tree.token_ids) - 1 > budget:
                proposal = None
            if proposal is not None:
                budget -= len(proposal.tree.token_ids) - 1
            if rows:
                yield Demand(sequence, rows, proposal)

    def _fit(self, demands: list[Demand], num_over: int, plan: RoundPlan) -> None:
        """Shrink `demands` in place until they fit the pool, of which they take so many slots too many: the oldest
        sequence alone always fits."""
        for i in range(len(demands) - 1, -1, -1):
            if num_over <= 0:
                return
            shrunk = demands[i]._replace(proposal=None)
            num_over -= demands[i].num_slots - shrunk.num_slots
            demands[i] = shrunk
        while num_over > 0:
            victim = _youngest(self.running[1:], _slots_of)[0]
            num_over -= sum([demand.num_slots for demand in demands if demand.sequence is victim]) + victim.num_rows
            demands[:] = [demand for demand in demands if demand.sequence is not victim]
            plan.preempted += self.preempt([victim])


def _may_share(one: Sequence, other: Sequence) -> bool:
    """Whether the rows of their texts' common beginning may be shared, if it is long enough to matter."""
    if not (one.shares_rows and other.shares_rows):
        return False
    mine, theirs = one.request, other.request
    is_allowed = (mine.scope, mine.cache_salt) == (theirs.scope, theirs.cache_salt)
    return is_allowed and one.block_digests[:1] == other.block_digests[:1] != []


def _num_common(one: Sequence, other: Sequence) -> int:
    """Leading tokens that are equal. Digests are compared up to the last block: texts may be long, and pairs many."""
    mine, theirs = one.block_digests, other.block_digests
    least, most = 0, min(len(mine), len(theirs))
    while least < most:
        middle = (least + most) // 2
        least, most = (middle + 1, most) if mine[middle] == theirs[middle] else (least, middle)
    rest = slice(least * BLOCK, least * BLOCK + BLOCK)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one.token_ids[rest], other.token_ids[rest], strict=False))
    return rest.start + sum(1 for _ in same)


def _slots_of(sequence: Sequence) -> int:
    return max(sequence.prefix_len, sequence.reserved_len) + sequence.source_len + 1


def _youngest(sequences: Series[Sequence], size: Callable[[Sequence], int]) -> tuple[Sequence, int]:
    """The last sequence of the client with the most in all, and how much that is."""
    held: Counter[int] = Counter()
    for sequence in sequences:
        held[sequence.request.scope] += size(sequence)
    ((scope, amount),) = held.most_common(1)
    return next(sequence for sequence in reversed(sequences) if sequence.request.scope == scope), amount


def _owed(waiting: Sequence, running: Series[Sequence], size: Callable[[Sequence], int]) -> Sequence | None:
    """The sequence that makes room for the waiting one, if its client keeps as much as the client of that one will
    have; else there would be no end of changes."""
    victim, amount = _youngest(running, size)
    own = sum([size(other) for other in running if other.request.scope == waiting.request.scope])
    return victim if amount - size(victim) >= own + size(waiting) else None


def _share(amount: int, clients: Sized) -> int:
    """What each of these clients may have of it, rounded up."""
    return -(-amount // max(1, len(clients)))
