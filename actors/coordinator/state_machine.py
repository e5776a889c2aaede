"""The coordinator: a pure state machine between clients, one drafter role and one target role.

Records go in through `on`, records come out; the type of a record names its destination (`DraftBatch` to the draft
ranks, `VerifyBatch` to the target ranks, the rest to a client). It holds no socket, thread, tensor or clock, so a test
can play every interleaving of arrivals, and the simulator runs this code.

    Request -> admit -> VerifyBatch(prompt)  --------------------> VerdictBatch
                     \\> DraftBatch(prompt)                             |
                         DraftBatch(commit, order) <------------- commit, then Tokens to the client
                         ProposalBatch ---> VerifyBatch(commit, proposal) ---> VerdictBatch ...

A round is `_advance` (order drafts, wait for them while that pays, verify) and `_end_round` (commit, emit). While the
target works, a `DraftPreviewBatch` may bring what draft-ahead prepared: a verdict that leads there starts the next pass
without an exchange with the drafter.

A role may be lost at any time. Without a drafter, decoding goes on plainly; without a target, requests wait with their
committed tokens. A role that returns holds no request; each is sent to it again. A late drafter is waited for until
`wait_until`; then the caller, which has the clock, calls `stop_waiting`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, replace
from typing import Any

from actors.coordinator.outbox import Outbox
from actors.coordinator.port import DrafterPort
from actors.coordinator.round import Round
from actors.coordinator.scheduler import Load, Scheduler
from actors.coordinator.sequence import DraftState, Sequence
from actors.coordinator.stats import CoordinatorStats
from actors.policy.decision import Mode
from actors.policy.policy import Policy, RoundObservation
from actors.protocol.membership import PassFailed, RoleBack, RoleLost, Weights
from actors.protocol.messages import (
    NO_TOKEN_FOLLOWS,
    Abort,
    Commit,
    DraftBatch,
    DraftPreviewBatch,
    Proposal,
    ProposalBatch,
    Report,
    ReportOrder,
    Request,
    Tokens,
    TokenTree,
    UpdateWeights,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    VerifyItem,
    WeightsUpdated,
)
from actors.topology import TOP

Answer = VerifyBatch | DraftBatch | Tokens | Report | WeightsUpdated
_LOST = "a rank of the target was lost meanwhile, and the weights before are served; update again"
MOST_FAILURES = 3
"""Passes that raise with one request, after which it ends: as many as an engine survives by default."""


class Coordinator:
    """Drives requests round by round, with the drafter behind `drafter`."""

    def __init__(
        self,
        scheduler: Scheduler,
        policy: Policy,
        eos_token_ids: Iterable[int],
        drafter: DrafterPort,
        *,
        weights: Weights | None = None,
        now: float = 0.0,
    ) -> None:
        self.weights = weights  # that the target serves; None: those it was started with
        self.wait_until: float | None = None  # when to go on without the awaited drafts, on the clock of `now`
        self._scheduler = scheduler
        self._policy = policy
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[int, Sequence] = {}
        self._has_target = True
        self._target_outbox = Outbox()
        self._verify_round = drafter.round  # of the last batch to the target; both batches of one round have one number
        self._drafter = drafter
        self._round = Round(now)
        self._stats = CoordinatorStats(since=now)
        self._uncounted: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # calls that bring `_stats` up to date
        self._num_ended = 0  # rounds that the policy has not learned from
        self._unlearned: list[RoundObservation] = []  # those of them that were counted
        self._lost_at: dict[str, float] = {}  # roles that have not answered since they were lost
        self._active_since: float | None = None
        self._wanted: Weights | None = None  # to be loaded once no pass is outstanding
        self._loading: Weights | None = None

    @property
    def num_requests(self) -> int:
        return len(self._sequences)

    @property
    def stats(self) -> CoordinatorStats:
        """The counters up to now. What a round adds is counted when they are asked for, or with what the policy learns
        from the round: not while the target waits for its next batch."""
        uncounted, self._uncounted = self._uncounted, []
        for count, arguments in uncounted:
            count(*arguments)
        return self._stats

    def check(self, batch: VerdictBatch) -> None:
        """Raise ValueError unless its verdicts are on what the target was given. Stale ones pass, because they change
        nothing."""
        verifying = self._round.verifying
        if verifying is None or batch.round != self._verify_round:
            return
        verdicts, sequences, proposals = batch.verdicts, self._sequences, self._round.proposals
        is_expected = len(verdicts) == 1 or len({verdict.request_id for verdict in verdicts}) == len(verdicts)
        if self._round.first_part is not None:
            has_more = bool(verdicts or batch.hits or batch.prompt_logprobs or batch.drafts_follow)
            is_expected = batch.follows_verdicts and not has_more
        if batch.prompt_logprobs or batch.hits:
            is_expected = is_expected and self._expects_of_prompts(batch)
        for verdict in verdicts:
            request_id = verdict.request_id
            if request_id not in verifying:
                continue  # ended since
            sequence, proposal = sequences[request_id], proposals[request_id]
            if verdict.epoch != sequence.epoch or verdict.prefix_len != len(sequence.token_ids):
                is_expected = False
            if verdict.path and (proposal is None or not proposal.tree.has_path(verdict.path)):
                is_expected = False
            if (kept := sequence.logprobs) is not None:
                prompt = next((part for part in batch.prompt_logprobs if part.request_id == request_id), None)
                is_expected = is_expected and kept.fits(verdict, prompt, sequence.num_generated)
            elif verdict.logprobs is not None:
                is_expected = False
        if not is_expected:
            raise ValueError("verdicts: they are not on what the target was given")

    def _expects_of_prompts(self, batch: VerdictBatch) -> bool:
        """Whether what it says of the rows and the log-probabilities of prompts is of requests that were asked for."""
        prompts = {part.request_id: part for part in batch.prompt_logprobs}
        if len(prompts) < len(batch.prompt_logprobs):
            return False
        for number, part in prompts.items():
            sequence = self._sequences.get(number)
            if sequence is not None and (sequence.logprobs is None or not sequence.logprobs.fits_prompt(part)):
                return False
        admitted = {sequence.request_id: sequence.prefix_len for sequence, _ in self._round.admitted}
        return all(0 < num_rows < admitted.get(request_id, 0) for request_id, num_rows in batch.hits)

    def load(self) -> Load:
        return self._scheduler.load()

    def count_active_time(self, now: float) -> None:
        """Count the time up to `now` in which there were requests."""
        if self._active_since is not None:
            self._stats.active_s += now - self._active_since
            self._active_since = now

    def last_round(self, role: str) -> int:
        """Round of the last batch sent to this role."""
        return self._verify_round if role == "target" else self._drafter.of(role).round

    def awaits(self, role: str) -> bool:
        """Whether this role has not answered its last batch yet."""
        return (self._round.verifying if role == "target" else self._drafter.of(role).pending) is not None

    def on(self, record: object, now: float, role: str = TOP) -> list[Answer]:
        """Process one record; return what to send, most urgent first. `now` is CLOCK_MONOTONIC seconds, `role` the one
        that a draft comes from.

        Then call `learn`, once all of it is sent.
        """
        self.learn()
        emitted: Iterable[Tokens | WeightsUpdated] = ()
        match record:
            case VerdictBatch():
                emitted = self._end_round(record, now)
            case ProposalBatch():
                self._receive_proposals(record, now, role)
            case DraftPreviewBatch():
                self._drafter.of(role).receive_previews(record, self._sequences)
                return []
            case Request():
                emitted = self._submit(record, now)
            case Abort():
                emitted = self._abort(record, now)
            case PassFailed():
                emitted = self._suspect(record, now)
            case RoleLost():
                emitted = self._lose(record.role, now)
            case RoleBack():
                self._regain(record)
            case UpdateWeights():
                emitted = self._want(record.weights)
            case ReportOrder():
                return [self._report(record, now)]
            case _:
                raise TypeError(f"not a record for the coordinator: {type(record).__name__}")
        batches = self._advance(now)
        if not self._sequences:
            self.count_active_time(now)
            self._active_since = None
            self._end_outages(now, *self._lost_at)
        return [*batches, *emitted]  # a role waits for its batch, a client only reads

    def stop_waiting(self, now: float) -> list[Answer]:
        """Go on without the awaited drafts if `wait_until` has passed; what to send, as of `on`."""
        self.learn()
        if self.wait_until is None or now < self.wait_until:
            return []
        return [*self._advance(now, may_wait=False)]

    @property
    def may_learn(self) -> bool:
        """Whether enough rounds have ended for the policy to learn from."""
        num_ended = self._num_ended
        return num_ended > 0 and (num_ended >= self._policy.most_unlearned or not self._sequences)

    def learn(self) -> None:
        """The policy learns from rounds that ended, beside the pass that was started since: from each, or from as many
        at once as is enough for it."""
        if not self.may_learn:
            return
        _ = self.stats  # with what is counted, rounds are looked at
        seen, self._unlearned, self._num_ended = self._unlearned, [], 0
        self._policy.update(*seen)
        for request_id in {outcome.request_id for one in seen for outcome in one.outcomes} - self._sequences.keys():
            self._policy.release(request_id)

    # --- a round ------------------------------------------------------------------------------------------------------

    def _advance(self, now: float, *, may_wait: bool = True) -> list[VerifyBatch | DraftBatch]:
        """Draft, then verify: order missing drafts, and start a target pass unless waiting for drafts is faster."""
        self.wait_until = None
        drafter, running = self._drafter, self._scheduler.running
        if self._round.verifying is not None or not self._has_target:
            may_order = self._policy.alternates or drafter.has_text_to_read(running, self._verify_round)
            return [*self._order_drafts(now)] if may_order else []
        if self._wanted is not None:
            return [self._start_loading(now)]
        if not drafter.has_ranks:  # nothing is ordered beside the pass, or waited for
            return [*self._start_pass((), now)]
        if unusable := drafter.unusable(running):
            self._preempt(self._scheduler.preempt(unusable))
        # Once time is up, a draft that is ordered now would be for a text that is verified meanwhile.
        orders = self._order_drafts(now) if may_wait else []
        held, pending = set[int](), drafter.pending
        if pending is not None or self._policy.alternates:
            running = self._scheduler.candidates
            missing = {sequence.request_id for sequence, _ in drafter.missing_drafts(running, ())}
            num_ready = sum([sequence.draft.proposal is not None for sequence in running])
            if self._policy.alternates and num_ready:
                held = missing
            elif missing and pending is not None:
                num_plain = len(self._scheduler.running) - len(missing) - num_ready + self._scheduler.num_joining
                wait_s = self._policy.wait.wait_s(
                    len(missing),
                    num_ready,
                    num_plain,
                    has_first_part=pending.has_first_part,
                    works_ahead=self._policy.works_ahead,
                    expected_s=self._policy.expected_gap_s,
                )
                if may_wait and wait_s:
                    self.wait_until = max(self._round.started, pending.asked_at) + wait_s
                    return [*orders]
                for order in drafter.unanswered:
                    order.is_skipped = True
        is_skipped = pending is not None and any(order.is_skipped for order in drafter.unanswered)
        self._round.skipped_drafts = is_skipped
        # Both roles read a prompt at the same time. The target's batch goes first: it depends on no order made now.
        return [*self._start_pass(held, now), *orders, *self._order_drafts(now)]

    def _preempt(self, sequences: Iterable[Sequence]) -> None:
        """They have left the batch, and will be read again from their committed tokens."""
        for sequence in sequences:
            self._target_outbox.release(sequence.request_id)
            self._drafter.release(sequence)
            self._stats.num_preemptions += 1

    def _end_round(self, batch: VerdictBatch, now: float) -> Iterable[Tokens | WeightsUpdated]:
        """Commit the verdicts, and emit the tokens; or the target has loaded weights. Where drafts follow the verdicts,
        the round ends with those."""
        round_, emitted = self._round, list[Tokens | WeightsUpdated]()
        verifying, first_part = round_.verifying, round_.first_part
        is_due = batch.follows_verdicts == (first_part is not None)  # else the verdicts before it were lost
        if verifying is None or batch.round != self._verify_round or not is_due:
            self._stats.num_stale += 1
            return []
        if self._lost_at:
            self._end_outages(now, "target")
        if self._loading is not None:
            return [self._end_loading(self._loading, batch.refusal, now)]
        if first_part is None:
            if round_.admitted or batch.prompt_logprobs:
                self._take_of_prompts(batch)
            round_.is_test = self._scheduler.tested is not None  # until its last verdict is committed
            for verdict in batch.verdicts:
                if verdict.request_id not in verifying:
                    self._stats.num_stale += 1  # of a request that was aborted
                    continue
                tokens = self._commit(verdict, now)
                if tokens.token_ids or tokens.finish_reason is not None:
                    emitted.append(tokens)
        else:
            batch = replace(batch, verdicts=first_part.verdicts)
        if batch.drafts_follow:
            self._uncounted += [(self._count_commit, result) for result in round_.results]
            round_.first_part, round_.verifying, round_.num_counted = batch, set(), len(round_.results)
            return emitted
        self._observe(batch, now)
        self._stats.num_stale += self._drafter.end_pass(batch, self._sequences)
        self._round = Round(now)
        if batch.drafts is not None:
            is_used = any(sequence.draft.proposal is not None for sequence in self._sequences.values())
            self._round.add_drafting(batch.drafts, is_used=is_used, unverified=round_.unverified)
        return emitted

    def _take_of_prompts(self, batch: VerdictBatch) -> None:
        """The target says of requests that were admitted with this pass how many rows it had, and log-probabilities of
        prompts."""
        hits = dict(batch.hits)
        for sequence, epoch in self._round.admitted:
            if sequence.epoch == epoch:
                num_rows = hits.get(sequence.request_id, 0)
                sequence.found(num_rows)
                if sequence.shares_rows and sequence.num_cached_tokens is None:
                    sequence.num_cached_tokens = min(num_rows, sequence.prompt_len)
                    self._stats.add_lookup(sequence.prompt_len, sequence.num_cached_tokens)
        for part in batch.prompt_logprobs:
            if part.request_id in self._sequences:
                kept = self._sequences[part.request_id].logprobs
                assert kept is not None, "`check` has seen to it"
                kept.add_prompt(part)

    def _commit(self, verdict: Verdict, now: float) -> Tokens:
        request_id = verdict.request_id
        sequence, proposal = self._sequences[request_id], self._round.proposals[request_id]
        if self.weights is not None or sequence.versions:
            sequence.note_version(self._version)
        commit = sequence.commit(verdict, proposal)
        position, token_ids = commit.prefix_len - sequence.prompt_len, commit.token_ids
        stats = error = logprobs = of_prompt = None
        proposers = proposal.proposers(commit.path[: len(token_ids)]) if proposal is not None else ()
        versions = sequence.versions_from(position) if sequence.versions else ()
        if (kept := sequence.logprobs) is not None:
            logprobs, of_prompt = kept.add(verdict.logprobs, len(token_ids)), kept.prompt_with(position)
        if sequence.first_token_at is None and token_ids:
            sequence.first_token_at = now
        if sequence.finish_reason != "error":
            self._round.results.append((commit, sequence.draft.num_ordered, proposal))
            self._target_outbox.add_commit(commit)
            is_own = proposal is None or not proposal.is_forced
            self._drafter.commit(sequence, commit if is_own else replace(commit, path=()))
            if verdict.forced:
                self._draft_forced(sequence, verdict)
        else:
            error = _no_token_after(sequence.prefix_len)
            self._count_commit(commit, 0, proposal)
        if sequence.finish_reason is not None:
            self._end(sequence, now)
            stats = sequence.stats()
        return Tokens(
            request_id,
            position,
            token_ids,
            sequence.finish_reason,
            stats,
            error,
            logprobs,
            of_prompt,
            proposers,
            versions,
        )

    def _draft_forced(self, sequence: Sequence, verdict: Verdict) -> None:
        """What the grammar forces next is the draft, and no drafter is asked for one."""
        length = min(len(verdict.forced), sequence.most_draft_tokens, self._policy.longest_draft)
        if length > 0 and sequence.finish_reason is None and self._drafter.may_draft(sequence):
            tree = TokenTree.chain(sequence.token_ids[-1], verdict.forced[:length])
            proposal = replace(Proposal.deterministic(*sequence.prefix, tree), prepared=None, is_forced=True)
            sequence.draft = DraftState(is_answered=True, proposal=proposal)

    def _observe(self, batch: VerdictBatch, now: float) -> None:
        """These verdicts end the round. The policy learns from it before the next drafts are ordered, where these may
        need it, else in `learn`; not from the test of a single request."""
        round_, drafter, policy = self._round, self._drafter, self._policy
        if drafter.scored.drafts:
            round_.scored = drafter.scored.take(self._sequences)
        round_.end(batch, now, self._scheduler.running, policy.mode, may_draft=drafter.is_present)
        self._uncounted.append((self._count_round, (round_,)))
        if round_.is_test:
            return
        is_plain = round_.mode in (Mode.rest, Mode.catch_up)
        if self._lost_at and is_plain and round_.results and round_.num_may_speculate:
            self._end_outages(now - round_.seconds, *self._lost_at)  # a drafter is there, and the policy does without
        self._num_ended += 1
        if not policy.most_unlearned:
            self.learn()

    def _count_round(self, round_: Round) -> None:
        """Count a round that has ended, and keep what it teaches."""
        stats, seen = self._stats, round_.observation()
        for result in round_.results[round_.num_counted :]:
            self._count_commit(*result)
        speculated = any(proposal is not None for proposal in round_.proposals.values())
        stats.add_pass(round_.batch, round_.sent_at, round_.ended, speculated=speculated)
        if speculated:
            stats.add_spec_round(seen.seconds, seen.verify_s, seen.draft_s)
        if not round_.is_test:
            if seen.outcomes and seen.num_may_speculate:
                lengths = [outcome.num_ordered for outcome in seen.outcomes]
                stats.add_mode(round_.mode, seen.seconds + seen.unused_s, lengths)
            self._unlearned.append(seen)
        if round_.batch.drafts is not None:
            stats.add_drafts(round_.batch.drafts)

    def _count_commit(self, commit: Commit, _: int, proposal: Proposal | None) -> None:
        self._stats.add_commit(proposal, commit, self._drafter.source_of(proposal))

    def _order_drafts(self, now: float) -> list[DraftBatch]:
        verifying = self._round.verifying
        least_round = self._verify_round + (verifying is None)
        return self._drafter.order(self._scheduler.running, () if verifying is None else verifying, least_round, now)

    def _start_pass(self, held: Collection[int], now: float) -> list[VerifyBatch]:
        """Plan the next pass without the requests that are `held`; none if there is nothing to compute."""
        plan = self._scheduler.plan(held, self._policy.most_text)
        if plan.preempted:
            self._preempt(plan.preempted)
        if plan.admitted:
            self._open_at_roles(plan.admitted, now)
        if not plan.rows:
            return []
        drafter, round_ = self._drafter, self._round
        after, self._verify_round = self._verify_round, max(self._verify_round + 1, drafter.round)
        orders = drafter.begin_pass(plan.rows, self._sequences.values())
        lengths, reading = orders.lengths, orders.reading
        items, proposals, may_draft = list[VerifyItem](), dict[int, Proposal | None](), False
        for sequence, num_rows, proposal in plan.rows:
            request_id = sequence.request_id
            may_draft = may_draft or drafter.may_draft(sequence)
            items.append(VerifyItem(request_id, num_rows, proposal, lengths.get(request_id, 0), request_id in reading))
            num_left = len(sequence.token_ids) - sequence.cached_len - num_rows
            if not num_left or sequence.may_hit:
                proposals[request_id] = proposal
            if num_left:
                sequence.cached_len += num_rows  # a chunk of committed text: its rows stay whatever the verdicts are
            sequence.draft.proposal = None  # used up
        round_.verifying, round_.proposals, round_.sent_at, round_.fed = {*proposals}, proposals, now, items
        round_.serves_drafts, round_.unverified = any(lengths.values()), orders.unverified
        admits, commits, releases = self._target_outbox.flush()
        batch = VerifyBatch(
            self._verify_round,
            admits,
            commits,
            releases,
            tuple(items),
            after,
            may_draft,
            orders.bridge,
            orders.num_received,
            orders.costs,
            orders.unverified,
        )
        return [batch]

    def _receive_proposals(self, batch: ProposalBatch, now: float, role: str) -> None:
        drafter = self._drafter.of(role)
        pending = drafter.order_of(batch)
        if pending is None:
            self._stats.num_stale += 1
            return
        if self._lost_at:
            self._end_outages(now, role)
        found = (0, 0) if batch.num_missing else (pending.num_prefetched, pending.num_missed)
        self._uncounted.append((self._stats.add_exchange, (batch, pending.left_at, now)))
        self._uncounted.append((self._stats.add_drafts, (batch, *found)))
        if pending.unverified:
            self._round.scored_s += batch.finished - batch.started
        elif self._round.verifying is None:
            self._round.add_wait(batch)
        self._stats.num_stale += drafter.receive(batch, self._sequences, now)

    # --- other weights ------------------------------------------------------------------------------------------------

    @property
    def _version(self) -> int:
        return self.weights.version if self.weights is not None else 0

    def _want(self, weights: Weights) -> list[WeightsUpdated]:
        """Load these weights once no pass is outstanding. The client asks again where the answer may be lost."""
        if weights in (self._wanted, self._loading):
            return []
        if weights.version == self._version:
            return [WeightsUpdated(weights.version)]
        self._wanted = weights
        return []

    def _start_loading(self, now: float) -> VerifyBatch:
        """All requests leave the batch, to be read again from their committed tokens once the weights are loaded."""
        self._loading, self._wanted = self._wanted, None
        self._preempt(self._scheduler.preempt(self._scheduler.running))
        after, self._verify_round = self._verify_round, max(self._verify_round + 1, self._drafter.round)
        self._round = Round(now)
        self._round.verifying, self._round.sent_at = set(), now
        return VerifyBatch(self._verify_round, *self._target_outbox.flush(), after=after, weights=self._loading)

    def _end_loading(self, weights: Weights, refusal: str, now: float) -> WeightsUpdated:
        """The target serves them, or refuses them and serves those that it had. What is known of acceptance is of the
        weights before; what passes cost stays."""
        self._loading, self._round = None, Round(now)
        if not refusal:
            self.weights = weights
            self._policy.forget_acceptance()
        return WeightsUpdated(weights.version, refusal)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _submit(self, request: Request, now: float) -> list[Tokens]:
        if (known := self._sequences.get(request.request_id)) is not None:
            return known.tokens_since(len(request.generated))
        sequence = Sequence.start(request, self._scheduler.capacity.max_model_len, self._eos_token_ids)
        refusal = self._scheduler.refusal(sequence)
        if refusal is not None:
            return [Tokens(request.request_id, 0, (), "error", sequence.stats(), refusal)]
        sequence.resume()
        if sequence.finish_reason is not None:  # only the news of its end was lost
            return [Tokens(request.request_id, len(request.generated), (), sequence.finish_reason, sequence.stats())]
        self._sequences[request.request_id] = sequence
        sequence.arrived_at = now
        # log-probabilities of a prompt are read where its rows are computed, and rows depend on the source
        may_share = request.prompt_logprobs is None and not request.source
        sequence.shares_rows = sequence.may_hit = self._scheduler.limits.prefix_cache and may_share
        self._scheduler.add(sequence)
        self._stats.num_prompt_tokens += sequence.prompt_len + sequence.source_len
        if self._active_since is None:
            self._active_since = now
            if self._round.verifying is None:
                self._round = Round(now)
        return []

    def _open_at_roles(self, sequences: list[Sequence], now: float) -> None:
        running = self._scheduler.running
        self._policy.expect_load(len(running), samples=2 * sum([one.is_sampled for one in running]) > len(running))
        for sequence in sequences:
            sequence.admitted_at = now if sequence.admitted_at is None else sequence.admitted_at
            self._target_outbox.admit(sequence)
            self._drafter.admit(sequence)
        self._round.admitted = [*self._round.admitted, *[(sequence, sequence.epoch) for sequence in sequences]]

    def _abort(self, record: Abort, now: float) -> list[Tokens]:
        sequence = self._sequences.get(record.request_id)
        if sequence is None:
            return []
        return [self._end_early(sequence, "abort", now)]

    def _end_early(self, sequence: Sequence, reason: str, now: float, error: str | None = None) -> Tokens:
        sequence.finish_reason = reason
        self._end(sequence, now)
        return Tokens(sequence.request_id, sequence.num_generated, (), reason, sequence.stats(), error)

    def _end(self, sequence: Sequence, now: float) -> None:
        self._stats.add_request(sequence, now)
        del self._sequences[sequence.request_id]
        self._scheduler.remove(sequence)
        self._policy.release(sequence.request_id)
        if self._round.verifying is not None:
            self._round.verifying.discard(sequence.request_id)
        self._target_outbox.end(sequence.request_id)
        self._drafter.release(sequence)

    # --- roles --------------------------------------------------------------------------------------------------------

    def _suspect(self, failed: PassFailed, now: float) -> list[Tokens]:
        """The target's last pass raised: its requests are tested one by one once the target is back. One that fails
        again by itself ends, and at its third failure any."""
        if failed.round != self._verify_round:
            return []
        fed, self._round.fed = self._round.fed, ()  # several ranks may report one pass
        ended = []
        for sequence in [self._sequences[one.request_id] for one in fed if one.request_id in self._sequences]:
            sequence.suspect()
            if sequence.num_failures >= (2 if len(fed) == 1 else MOST_FAILURES):
                error = f"target: {sequence.num_failures} passes with this request failed ({failed.error}); see its log"
                ended.append(self._end_early(sequence, "error", now, error))
        return ended

    def _lose(self, role: str, now: float) -> list[WeightsUpdated]:
        """The role lost its state: none of its batches will be answered, and every request must be sent to it again.

        Where the target was loading weights, all ranks load those before again as they join.
        """
        self._stats.num_role_losses[role] = self._stats.num_role_losses.get(role, 0) + 1
        self._lost_at.setdefault(role, now)
        if role != "target":
            self._drafter.of(role).lose(self._sequences.values())
            return []
        self._has_target, self._target_outbox = False, Outbox()
        fed = self._round.fed
        if self._round.first_part is not None:  # its results are counted
            self._round = Round(now)
        self._round.verifying, self._round.admitted, self._round.fed = None, (), fed
        for sequence in self._scheduler.preempt(self._scheduler.running):
            self._drafter.release(sequence)
        lost, self._loading = self._loading, None
        return [] if lost is None else [WeightsUpdated(lost.version, _LOST, is_lost=True)]

    def _regain(self, back: RoleBack) -> None:
        if back.role != "target":
            self._drafter.of(back.role).regain(back.epoch)
        else:
            self._has_target = True

    def _end_outages(self, now: float, *roles: str) -> None:
        """End the outage of roles that were lost: each answered, or returned and nothing is asked of it. Without a
        drafter is the time since the last one of all was lost."""
        for role in roles:
            is_back = self._has_target if role == "target" else self._drafter.of(role).is_present
            if role in self._lost_at and is_back:
                others = [at for one, at in self._lost_at.items() if one not in (role, "target")]
                since = self._lost_at.pop(role)
                self._stats.add_outage(role, max(0.0, now - since))
                if role != "target" and len(others) + 1 == self._drafter.num_seats:
                    self._stats.no_drafter_s += max(0.0, now - max([since, *others]))

    def _report(self, order: ReportOrder, now: float) -> Report:
        self.count_active_time(now)
        stats = self.stats
        stats.guard = self._policy.findings()
        report = stats.report(now, spans=order.spans)
        report.counters.update(asdict(self.load()))
        if order.reset:
            self._stats = CoordinatorStats(since=now, phase=order.phase)
        return report


def _no_token_after(num_tokens: int) -> str:
    return (
        f"{NO_TOKEN_FOLLOWS} the first {num_tokens}: the request's sampling or grammar rules all out (loosen "
        "the grammar, bad_words, allowed_token_ids, or min_tokens with stop_token_ids), or logits are not finite (use "
        "another target.dtype or checkpoint)"
    )
