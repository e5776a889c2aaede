"""The coordinator: a pure state machine between a client, one drafter role and one target role.

Records go in through `on`, records come out; the type of a record names its destination (`DraftBatch` to the draft
ranks, `VerifyBatch` to the target ranks, the rest to the client). It holds no socket, thread, tensor or clock of its
own, so every interleaving of arrivals can be played in a test, and the simulator can drive the real thing.

A role may be lost at any moment. Without a drafter, decoding goes on at once, plainly; without a target, every request
waits with its committed tokens. A role that is back knows nothing and is told everything again.

    Request -> admit -> VerifyBatch(prompt)  --------------------> VerdictBatch
                     \\> DraftBatch(prompt)                             |
                         DraftBatch(commit, order) <------------- commit, then Tokens to the client
                         ProposalBatch ---> VerifyBatch(commit, proposal) ---> VerdictBatch ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from actors.ledger import Ledger
from actors.lifecycle import RoleBack, RoleLost
from actors.messages import (
    Abort,
    DraftBatch,
    DraftOrder,
    Proposal,
    ProposalBatch,
    ReportOrder,
    Request,
    Tokens,
    VerdictBatch,
    VerifyBatch,
    VerifyItem,
)
from actors.pipelines import Pipeline
from actors.pipelines.cost import Costs
from actors.scheduler import Load, PassPlan, Scheduler
from actors.sequence import Sequence
from actors.tally import Tally


class Coordinator:
    """Drives requests round by round. `drafts` is False where no drafter role exists."""

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        eos_token_ids: Iterable[int],
        *,
        drafts: bool,
        now: float = 0.0,
        first_round: int = 0,
    ) -> None:
        self.tally = Tally(since=now)
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._eos_token_ids = frozenset(eos_token_ids)
        self._here = {"target": True, "draft": drafts}
        self._lost_at: dict[str, float] = {}  # roles that have not answered anything since they were lost
        self._sequences: dict[int, Sequence] = {}
        self._proposals: dict[int, Proposal] = {}
        self._target = Ledger()
        self._draft = Ledger()
        self._costs = Costs()
        self._draft_round = first_round  # of the last batch sent to each role; both sides of one round bear one number
        self._verify_round = first_round
        self._drafting: dict[int, int] | None = None  # outstanding orders: request -> prefix_len they assume
        self._heard = False  # the first answer to the outstanding orders has come, but not the last
        self._answered: set[int] = set()  # requests whose order for the present prefix was answered, well or not
        self._verifying: dict[int, Proposal | None] | None = None  # requests of the outstanding pass
        self._round_started: float | None = None
        self._round_busy_s = 0.0
        self._active_since: float | None = None

    @property
    def num_requests(self) -> int:
        return self._scheduler.num_requests

    def load(self) -> Load:
        return self._scheduler.load()

    def settle(self, now: float) -> None:
        """Count the time up to `now` in which there was work."""
        if self._active_since is not None:
            self.tally.active_s += now - self._active_since
            self._active_since = now

    def last_round(self, role: str) -> int:
        """Of the last batch sent to this role."""
        return self._verify_round if role == "target" else self._draft_round

    def awaits(self, role: str) -> bool:
        """Whether an answer of this role to its last batch is still to come."""
        return (self._verifying if role == "target" else self._drafting) is not None

    def on(self, record: Any, now: float) -> list[Any]:
        """Take one record; return what has to be sent, most urgent first. `now` is CLOCK_MONOTONIC seconds."""
        news: list[Any] = []
        match record:
            case Request():
                news += self._submit(record, now)
            case Abort():
                news += self._abort(record, now)
            case ProposalBatch():
                self._take_proposals(record, now)
            case VerdictBatch():
                news += self._take_verdicts(record, now)
            case RoleLost():
                self._lose(record.role, now)
            case RoleBack():
                self._regain(record.role, now)
            case ReportOrder():
                return [self._report(record, now)]
            case _:
                raise TypeError(f"the coordinator has no use for {type(record).__name__}")
        orders = self._advance(now)
        if not self.num_requests:
            self.settle(now)
            self._active_since = None
        # What a role waits for goes out before what a client merely reads.
        return orders + news

    def _submit(self, request: Request, now: float) -> list[Any]:
        known = self._sequences.get(request.request_id)
        if known is not None and replace(request, generated=known.request.generated) == known.request:
            self.tally.num_stale += 1
            return known.news_since(len(request.generated))
        sequence = Sequence.start(request, self._scheduler.capacity.max_model_len)
        refusal = self._scheduler.refusal(sequence)
        if refusal is None and known is not None:
            refusal = f"request_id: {request.request_id} is in use"
        if refusal is not None:
            return [Tokens(request.request_id, 0, (), "error", sequence.stats(), refusal)]
        self._sequences[request.request_id] = sequence
        sequence.arrived_at = now
        self._scheduler.add(sequence)
        self.tally.num_prompt_tokens += sequence.prompt_len
        if self._active_since is None:
            self._active_since = now
        return []

    def _abort(self, record: Abort, now: float) -> list[Any]:
        sequence = self._sequences.get(record.request_id)
        if sequence is None:
            return []
        sequence.finish_reason = "abort"
        self.tally.request_ended(sequence, now)
        self._end(sequence)
        return [Tokens(sequence.request_id, sequence.num_generated, (), "abort", sequence.stats())]

    def _lose(self, role: str, now: float) -> None:
        """Nothing that was asked of this role will be answered; what it is told next is the whole of it."""
        self.tally.num_role_losses[role] = self.tally.num_role_losses.get(role, 0) + 1
        self._lost_at.setdefault(role, now)
        self._here[role] = False
        if role == "draft":
            self._draft, self._drafting, self._heard = Ledger(), None, False
            self._answered.clear()
            return
        self._target, self._verifying = Ledger(), None
        for sequence in self._scheduler.preempt_all():
            self._forget_draft(sequence)
            self._draft.release(sequence.request_id)

    def _regain(self, role: str, now: float) -> None:
        self._here[role] = True
        if not self.num_requests:
            self._resumed(role, now)
        if role == "draft":
            for sequence in self._scheduler.running:
                self._admit_to_draft(sequence)

    def _resumed(self, role: str, now: float) -> None:
        if role in self._lost_at and self._here[role]:
            self.tally.resumed(role, now - self._lost_at.pop(role))

    def _admit_to_draft(self, sequence: Sequence) -> None:
        if self._here["draft"] and sequence.request.speculate:
            self._draft.admit(sequence)

    def _take_proposals(self, batch: ProposalBatch, now: float) -> None:
        if self._drafting is None or batch.round != self._draft_round:
            self.tally.num_stale += 1
            return
        self._resumed("draft", now)
        self.tally.drafted(batch)
        self._round_busy_s += batch.finished - batch.started
        for proposal in batch.proposals:
            sequence = self._sequences.get(proposal.request_id)
            if sequence is not None and sequence.accepts(proposal):
                self._proposals[proposal.request_id] = proposal
            else:
                self.tally.num_stale += 1
        if not batch.num_missing:
            if any(not proposal.prepared for proposal in batch.proposals):
                self._costs.saw_draft(batch.finished - batch.started)
            answered, self._drafting, self._heard = self._drafting, None, False
        else:
            answered = {proposal.request_id: proposal.prefix_len for proposal in batch.proposals}
            self._heard = True
        for request_id, prefix_len in answered.items():
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.prefix_len == prefix_len:
                self._answered.add(request_id)

    def _take_verdicts(self, batch: VerdictBatch, now: float) -> list[Any]:
        if self._verifying is None or batch.round != self._verify_round:
            self.tally.num_stale += 1
            return []
        self._resumed("target", now)
        offered, self._verifying = self._verifying, None
        self._costs.saw_verify(batch.finished - batch.started)
        speculated = any(proposal is not None for proposal in offered.values())
        self.tally.judged(batch, speculated=speculated)
        news: list[Any] = []
        for verdict in batch.verdicts:
            if verdict.request_id not in offered:  # it was aborted meanwhile
                self.tally.num_stale += 1
                continue
            sequence, proposal = self._sequences[verdict.request_id], offered[verdict.request_id]
            position = sequence.num_generated
            commit = sequence.commit(verdict, proposal, self._eos_token_ids)
            self._forget_draft(sequence)
            sequence.first_token_at = now if sequence.first_token_at is None else sequence.first_token_at
            self.tally.verified(proposal, commit)
            if proposal is not None and proposal.tree.num_draft_tokens:
                self._costs.saw_acceptance(len(commit.token_ids))
            self._target.commit(commit)
            self._draft.commit(commit)
            ended = sequence.finish_reason is not None
            if ended:
                self._end(sequence)
                self.tally.request_ended(sequence, now)
            stats = sequence.stats() if ended else None
            news.append(Tokens(sequence.request_id, position, commit.token_ids, sequence.finish_reason, stats))
        self._end_round(batch, now, speculated=speculated)
        return news

    def _end_round(self, batch: VerdictBatch, now: float, *, speculated: bool) -> None:
        if speculated and self._round_started is not None:
            busy_s = self._round_busy_s + batch.finished - batch.started
            self.tally.round_ended(self._round_started, now, busy_s)
        self._round_started = now if self.num_requests else None
        self._round_busy_s = 0.0

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self._scheduler.remove(sequence)
        self._forget_draft(sequence)
        if self._verifying is not None:
            self._verifying.pop(sequence.request_id, None)
        self._target.release(sequence.request_id)
        self._draft.release(sequence.request_id)

    def _forget_draft(self, sequence: Sequence) -> None:
        self._proposals.pop(sequence.request_id, None)
        self._answered.discard(sequence.request_id)

    def _advance(self, now: float) -> list[Any]:
        """Order drafts, then start a target pass if the policy lets it."""
        if self._verifying is not None or not self._here["target"]:
            return self._order_drafts() if self._pipeline.alternates else []
        if self._round_started is None and self.num_requests:
            self._round_started = now
        orders = self._order_drafts()
        expecting = len(self._expecting())
        if not self._pipeline.may_verify(expecting, len(self._proposals), self._heard, self._costs):
            return orders
        held = {sequence.request_id for sequence in self._expecting()} if self._pipeline.alternates else set()
        plan = self._scheduler.plan(self._proposals, held)
        for sequence in plan.preempted:
            self._forget_draft(sequence)
            self._target.release(sequence.request_id)
            self._draft.release(sequence.request_id)
            self.tally.num_preemptions += 1
        for sequence in plan.admitted:
            sequence.admitted_at = now if sequence.admitted_at is None else sequence.admitted_at
            self._target.admit(sequence)
            self._admit_to_draft(sequence)
        verify = self._start_pass(plan)
        # Both sides read a prompt at the same time.
        return orders + self._order_drafts() + verify

    def _wants_draft(self, sequence: Sequence) -> int:
        """Draft tokens this sequence should have before its next pass, 0 if it should not be speculated for."""
        if not self._here["draft"] or not sequence.request.speculate or sequence.uncached_len != 1:
            return 0
        if self._verifying is not None and sequence.request_id in self._verifying:
            return 0
        return self._pipeline.num_draft_tokens(sequence)

    def _expecting(self) -> list[Sequence]:
        return [
            sequence
            for sequence in self._scheduler.running
            if sequence.request_id not in self._answered
            and self._wants_draft(sequence)
        ]

    def _order_drafts(self) -> list[DraftBatch]:
        if self._drafting is not None:
            return []
        chosen = self._pipeline.choose(self._expecting(), len(self._scheduler.running))
        orders = [DraftOrder(sequence.request_id, self._wants_draft(sequence)) for sequence in chosen]
        if not orders and not self._draft.has_news:
            return []
        admits, commits, releases = self._draft.flush()
        orders += [DraftOrder(admit.request_id, 0) for admit in admits if admit.request_id in self._sequences]
        self._drafting = {
            order.request_id: self._sequences[order.request_id].prefix_len for order in orders if order.num_draft_tokens
        }
        after, verify_round = self._draft_round, self._verify_round + (self._verifying is None)
        self._draft_round = max(after + 1, verify_round)
        return [DraftBatch(self._draft_round, admits, commits, releases, tuple(_first_of_each(orders)), after)]

    def _start_pass(self, plan: PassPlan) -> list[VerifyBatch]:
        if not plan.rows:
            return []
        after, self._verify_round = self._verify_round, max(self._verify_round + 1, self._draft_round)
        items = []
        self._verifying = {}
        for sequence, num_tokens, proposal in plan.rows:
            items.append(VerifyItem(sequence.request_id, num_tokens, proposal))
            if num_tokens == sequence.uncached_len:
                self._verifying[sequence.request_id] = proposal
            else:
                sequence.cached_len += num_tokens  # a chunk of committed text: its rows are kept whatever comes
            self._proposals.pop(sequence.request_id, None)
        return [VerifyBatch(self._verify_round, *self._target.flush(), tuple(items), after)]

    def _report(self, order: ReportOrder, now: float) -> Any:
        self.settle(now)
        report = self.tally.report(now)
        if order.reset:
            self.tally = Tally(since=now, phase=order.phase)
        return report


def _first_of_each(orders: list[DraftOrder]) -> list[DraftOrder]:
    """A request that is admitted and drafted for in one batch needs only the larger order, which stands first."""
    return list({order.request_id: order for order in reversed(orders)}.values())[::-1]
