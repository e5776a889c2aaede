"""The coordinator: a pure state machine between a client, one drafter role and one target role.

Records go in through `on`, records come out; the type of a record names its destination (`DraftBatch` to the draft
ranks, `VerifyBatch` to the target ranks, the rest to the client). It holds no socket, thread, tensor or clock of its
own, so every interleaving of arrivals can be played in a test, and the simulator can drive the real thing.

A role may be lost at any moment. Without a drafter, decoding goes on at once, plainly; without a target, every request
waits with its committed tokens. A role that is back knows nothing and is told everything again. One that is late, or
hangs, is waited for until `patience_ends`; whoever has the clock then says that it is `overdue`.

    Request -> admit -> VerifyBatch(prompt)  --------------------> VerdictBatch
                     \\> DraftBatch(prompt)                             |
                         DraftBatch(commit, order) <------------- commit, then Tokens to the client
                         ProposalBatch ---> VerifyBatch(commit, proposal) ---> VerdictBatch ...

While the target works, an `DraftPreviewBatch` may tell what is prepared: a verdict that leads there starts the next pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from actors.coordinator.drafter_session import DrafterSession
from actors.coordinator.outbox import Outbox
from actors.coordinator.round import Round, extent
from actors.coordinator.scheduler import Load, PassPlan, Scheduler
from actors.coordinator.sequence import Sequence
from actors.coordinator.stats import CoordinatorStats
from actors.policy.draft_length import Control, FixedControl
from actors.policy.draft_wait import Costs, Standing
from actors.policy.pipelines import Pipeline
from actors.protocol.membership import RoleBack, RoleLost
from actors.protocol.messages import (
    Abort,
    DraftBatch,
    DraftPreviewBatch,
    Proposal,
    ProposalBatch,
    ReportOrder,
    Request,
    Tokens,
    VerdictBatch,
    VerifyBatch,
    VerifyItem,
)


class Coordinator:
    """Drives requests round by round. `drafts` is False where no drafter role exists."""

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        eos_token_ids: Iterable[int],
        *,
        drafts: bool,
        control: Control | None = None,
        now: float = 0.0,
        first_round: int = 0,
    ) -> None:
        self.stats = CoordinatorStats(since=now)
        self._scheduler = scheduler
        self._pipeline = pipeline
        self.patience_ends: float | None = None  # when to go on without what is awaited, on the clock of `now`
        control, piece = control or FixedControl(), scheduler.limits.prefill_chunk
        self._draft = DrafterSession(pipeline, control, here=drafts, first_round=first_round, piece=piece)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._has_target = True
        self._lost_at: dict[str, float] = {}  # roles that have not answered anything since they were lost
        self._sequences: dict[int, Sequence] = {}
        self._target = Outbox()
        self._costs = Costs(control.weighs_waiting, pipeline.longest_draft)
        self._verify_round = first_round  # of the last batch to the target; both sides of one round bear one number
        self._verifying: dict[int, Proposal | None] | None = None  # requests of the outstanding pass
        self._round: Round | None = None
        self._draft_sent = self._verify_sent = now
        self._asked_at = now  # when the outstanding orders left, or their first answer came
        self._active_since: float | None = None

    @property
    def num_requests(self) -> int:
        return self._scheduler.num_requests

    def load(self) -> Load:
        return self._scheduler.load()

    def settle(self, now: float) -> None:
        """Count the time up to `now` in which there was work."""
        if self._active_since is not None:
            self.stats.active_s += now - self._active_since
            self._active_since = now

    def last_round(self, role: str) -> int:
        """Of the last batch sent to this role."""
        return self._verify_round if role == "target" else self._draft.round

    def awaits(self, role: str) -> bool:
        """Whether an answer of this role to its last batch is still to come."""
        return self._verifying is not None if role == "target" else self._draft.is_busy

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
            case DraftPreviewBatch():
                self._draft.receive_previews(record, self._sequences)
                return []
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
            return known.tokens_since(len(request.generated))
        sequence = Sequence.start(request, self._scheduler.capacity.max_model_len)
        refusal = self._scheduler.refusal(sequence)
        if refusal is None and known is not None:
            refusal = f"request_id: {request.request_id} is in use"
        if refusal is not None:
            return [Tokens(request.request_id, 0, (), "error", sequence.stats(), refusal)]
        self._sequences[request.request_id] = sequence
        sequence.arrived_at = now
        self._scheduler.add(sequence)
        self.stats.num_prompt_tokens += sequence.prompt_len
        if self._active_since is None:
            self._active_since = now
        return []

    def _abort(self, record: Abort, now: float) -> list[Any]:
        sequence = self._sequences.get(record.request_id)
        if sequence is None:
            return []
        sequence.finish_reason = "abort"
        self.stats.request_ended(sequence, now)
        self._end(sequence)
        return [Tokens(sequence.request_id, sequence.num_generated, (), "abort", sequence.stats())]

    def _lose(self, role: str, now: float) -> None:
        """Nothing that was asked of this role will be answered; what it is told next is the whole of it."""
        self.stats.num_role_losses[role] = self.stats.num_role_losses.get(role, 0) + 1
        self._lost_at.setdefault(role, now)
        if role == "draft":
            self._draft.lose()
            return
        self._has_target = False
        self._target, self._verifying = Outbox(), None
        for sequence in self._scheduler.preempt_all():
            self._draft.release(sequence.request_id)

    def _regain(self, role: str, now: float) -> None:
        if role == "draft":
            self._draft.here = True
        else:
            self._has_target = True
        if not self.num_requests:
            self._resumed(role, now)

    def _resumed(self, role: str, now: float) -> None:
        if role in self._lost_at and (self._has_target if role == "target" else self._draft.here):
            self.stats.resumed(role, now - self._lost_at.pop(role))

    def _take_proposals(self, batch: ProposalBatch, now: float) -> None:
        if not self._draft.answers(batch):
            self.stats.num_stale += 1
            return
        self._resumed("draft", now)
        self.stats.drafted(batch, 0 if batch.num_missing else self._draft.num_taken)
        self.stats.sent("order", batch.round, self._draft_sent, batch.started)
        self.stats.sent("proposal", batch.round, batch.finished, now)
        self._draft_sent = batch.finished  # of the second part of an answer
        if self._verifying is None and self._round is not None:
            self._round.waited(batch)
        if self._draft.is_drafting:
            self._costs.update_delay(now - self._asked_at, rest=self._draft.heard)
            self._asked_at = now
        mode = self._draft.control.mode
        self.stats.num_stale += self._draft.take(batch, self._sequences)
        if mode is not self._draft.control.mode:  # a trial begins
            self._costs.forget_delays()

    def _take_verdicts(self, batch: VerdictBatch, now: float) -> list[Any]:
        if self._verifying is None or batch.round != self._verify_round:
            self.stats.num_stale += 1
            return []
        self._resumed("target", now)
        self.stats.sent("verify", batch.round, self._verify_sent, batch.started)
        self.stats.sent("verdict", batch.round, batch.finished, now)
        offered, self._verifying = self._verifying, None
        speculated = any(proposal is not None for proposal in offered.values())
        self.stats.judged(batch, speculated=speculated)
        news: list[Any] = []
        round_ = self._round or Round(now)
        for verdict in batch.verdicts:
            if verdict.request_id not in offered:  # it was aborted meanwhile
                self.stats.num_stale += 1
                continue
            sequence, proposal = self._sequences[verdict.request_id], offered[verdict.request_id]
            position = sequence.num_generated
            commit = sequence.commit(verdict, proposal, self._eos_token_ids)
            round_.committed(commit, self._draft.ordered.get(sequence.request_id, 0), proposal)
            self._draft.forget_draft(sequence.request_id)
            sequence.first_token_at = now if sequence.first_token_at is None else sequence.first_token_at
            self.stats.verified(proposal, commit)
            if proposal is not None and proposal.tree.num_draft_tokens:
                self._costs.update_acceptance(len(commit.token_ids))
            self._target.commit(commit)
            self._draft.commit(commit)
            ended = sequence.finish_reason is not None
            if ended:
                self._end(sequence)
                self.stats.request_ended(sequence, now)
            stats = sequence.stats() if ended else None
            news.append(Tokens(sequence.request_id, position, commit.token_ids, sequence.finish_reason, stats))
        self._costs.update_verify(batch.finished - batch.started, reads_prompt=round_.reads_prompt(batch))
        if speculated:
            self.stats.round_ended(now - round_.started, batch.finished - batch.started, round_.waited_s)
        if round_.offers:
            self._teach(round_, batch, now)
        self._round = Round(now) if self.num_requests else None
        return news

    def _teach(self, round_: Round, batch: VerdictBatch, now: float) -> None:
        """Tell the control what this round was, before the next drafts are ordered."""
        running, control = self._scheduler.running, self._draft.control
        seen = round_.seen(batch, now, running, sum(self._draft.serves(sequence) for sequence in running))
        if seen.num_willing:
            self.stats.round_seen(control.mode, seen.seconds, [offer.num_draft_tokens for offer in seen.offers])
        control.update(seen)
        if control.guard is not None:
            self.stats.guard = control.guard.findings()
        for offer in seen.offers:
            if offer.request_id not in self._sequences:
                control.forget(offer.request_id)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self._scheduler.remove(sequence)
        self._draft.control.forget(sequence.request_id)
        if self._verifying is not None:
            self._verifying.pop(sequence.request_id, None)
        self._target.release(sequence.request_id)
        self._draft.release(sequence.request_id)

    def overdue(self, now: float) -> list[Any]:
        """Go on without what is awaited if patience has ended by `now`; what to send, as of `on`."""
        if self.patience_ends is None or now < self.patience_ends:
            return []
        return self._advance(now, waits=False)

    def _advance(self, now: float, *, waits: bool = True) -> list[Any]:
        """Order drafts, then start a target pass if the policy lets it, or `waits` no longer."""
        self.patience_ends = None
        if self._verifying is not None or not self._has_target:
            reads = self._draft.must_read(self._scheduler.running, self._verify_round)
            return self._order_drafts(now) if self._pipeline.alternates or reads else []
        if self._round is None and self.num_requests:
            self._round = Round(now)
        orders = self._order_drafts(now)
        expecting = self._draft.expecting(self._scheduler.running, ())
        standing = self._standing(len(expecting))
        if waits and not self._pipeline.may_verify(standing, self._costs):
            # What was waited for before this was asked for is lost either way.
            since = max(self._round.started, self._asked_at) if self._round is not None else self._asked_at
            self.patience_ends = since + self._costs.patience_s(standing)
            return orders
        sits_out = self._pipeline.alternates and standing.num_ready
        held = {sequence.request_id for sequence in expecting} if sits_out else set()
        if expecting and not held:
            self._draft.give_up()
        if self._round is not None:
            self._round.went_on = self._draft.given_up
        plan = self._scheduler.plan(self._draft.proposals, held)
        for sequence in plan.preempted:
            self._target.release(sequence.request_id)
            self._draft.release(sequence.request_id)
            self.stats.num_preemptions += 1
        if plan.admitted:
            self._draft.control.approach(*extent(self._scheduler.running))
        for sequence in plan.admitted:
            sequence.admitted_at = now if sequence.admitted_at is None else sequence.admitted_at
            self._target.admit(sequence)
            self._draft.admit(sequence)
        verify = self._start_pass(plan, now)
        # Both sides read a prompt at the same time. The target goes first: it needs nothing of what is ordered now.
        return verify + orders + self._order_drafts(now)

    def _order_drafts(self, now: float) -> list[DraftBatch]:
        verifying = self._verifying if self._verifying is not None else ()
        least = self._verify_round + (self._verifying is None)
        orders = self._draft.order(self._scheduler.running, verifying, self._sequences, least)
        if orders:
            self._draft_sent = self._asked_at = now
        return orders

    def _standing(self, num_expecting: int) -> Standing:
        running, num_ready = self._scheduler.running, len(self._draft.proposals)
        num_free = min(len(self._scheduler.waiting), self._scheduler.limits.max_num_seqs - len(running))
        num_plain = len(running) - num_expecting - num_ready + num_free
        return Standing(num_expecting, num_ready, num_plain, self._draft.heard)

    def _start_pass(self, plan: PassPlan, now: float) -> list[VerifyBatch]:
        if not plan.rows:
            return []
        after, self._verify_round = self._verify_round, max(self._verify_round + 1, self._draft.round)
        items = []
        self._verifying, self._verify_sent = {}, now
        for sequence, num_tokens, proposal in plan.rows:
            items.append(VerifyItem(sequence.request_id, num_tokens, proposal))
            if num_tokens == sequence.uncached_len:
                self._verifying[sequence.request_id] = proposal
            else:
                sequence.cached_len += num_tokens  # a chunk of committed text: its rows are kept whatever comes
            self._draft.proposals.pop(sequence.request_id, None)
        return [VerifyBatch(self._verify_round, *self._target.flush(), tuple(items), after)]

    def _report(self, order: ReportOrder, now: float) -> Any:
        self.settle(now)
        report = self.stats.report(now)
        if order.reset:
            self.stats = CoordinatorStats(since=now, phase=order.phase)
        return report
