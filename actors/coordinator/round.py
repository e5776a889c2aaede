"""The present round: from one verdict to the next. Bookkeeping of times that the caller read; decides nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from actors.coordinator.sequence import Sequence
from actors.policy.acceptance import DraftOutcome
from actors.policy.policy import RoundObservation
from actors.protocol.messages import Commit, Proposal, ProposalBatch, VerdictBatch


@dataclass(slots=True)
class Round:
    """What happens between two verdicts, as far as it is known."""

    started: float
    verifying: set[int] | None = None
    """The requests that await a verdict of the outstanding pass; None while no pass is outstanding."""
    fed: tuple[int, ...] = ()
    """All requests of that pass, also those that it reads a part of; none once it is known to have failed."""
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)
    """The requests that the target is sent first with that pass, and their epochs."""
    proposals: Mapping[int, Proposal | None] = field(default_factory=dict)
    """Those of this pass, by request, also of requests that have ended since."""
    sent_at: float = 0.0
    """When the batch of this pass left."""
    drafted_before_s: float = 0.0
    """Time that an attached drafter took for this round's drafts, at the end of the round before."""
    first_part: VerdictBatch | None = None
    """The verdicts of this pass, which are committed, where drafts behind them are yet to come."""
    is_test: bool = False
    """The pass was that of a request which is tested alone."""
    unverified: bool = False
    """The drafts that an attached drafter makes behind this pass are only compared with the text."""
    seen: RoundObservation = field(default_factory=RoundObservation)
    """What the policy learns from it, as far as it is known: completed by `observation`."""

    def add_drafting(self, drafts: ProposalBatch, *, is_used: bool, unverified: bool) -> None:
        """An attached drafter worked before this round; `is_used`: a draft of it may be verified."""
        seconds = drafts.finished - drafts.started
        if unverified:
            self.seen.scored_s = seconds
        elif is_used:
            self.seen.draft_s = self.drafted_before_s = seconds
            self.seen.read_s = drafts.read_s
        else:
            self.seen.unused_s = seconds

    def add_wait(self, batch: ProposalBatch) -> None:
        """The drafter answered while the target idles; a pass of draft-ahead that the round's start cut also counts."""
        self.seen.draft_s += batch.finished - batch.started
        self.seen.read_s += batch.read_s
        for started, finished, _ in batch.ahead:
            self.seen.draft_s += max(0.0, finished - max(started, self.started))

    def add_outcome(self, commit: Commit, num_ordered: int, proposal: Proposal | None) -> None:
        """One sequence got its verdict; `num_ordered` draft tokens had been ordered for it."""
        path, brought, num_missing = (), 0, 0
        if proposal is not None and not proposal.is_forced and (size := proposal.tree.num_draft_tokens):
            path, brought = commit.path, len(commit.token_ids)  # what a grammar forced says nothing of the drafter
            num_missing = max(0, num_ordered - size)
        self.seen.outcomes.append(DraftOutcome(commit.request_id, num_ordered, path, brought, num_missing))

    def observation(
        self,
        batch: VerdictBatch,
        now: float,
        running: Collection[Sequence],
        scored: Collection[DraftOutcome] = (),
        *,
        may_draft: bool,
    ) -> RoundObservation:
        """The round that ends with this verdict, as the policy learns from it; `scored`: drafts without a pass that the
        texts have decided, `may_draft`: there is a drafter."""
        seen, num_decoding_rows = self.seen, len(batch.verdicts)
        for verdict in batch.verdicts:
            if (proposal := self.proposals.get(verdict.request_id)) is not None:
                num_decoding_rows += proposal.tree.num_draft_tokens
        # with its own drafts: those that came with this verdict are of the next round
        seen.seconds = now - self.started - (batch.left_at - batch.finished) + self.drafted_before_s
        seen.verify_s = batch.finished - batch.started
        num_running, num_sampled, num_tokens, num_may_speculate = max(1, len(running)), 0, 0, 0
        for sequence in running:
            num_sampled += sequence.is_sampled
            num_tokens += len(sequence.token_ids)
            num_may_speculate += sequence.speculates
        seen.mean_len, seen.samples = num_tokens / num_running, 2 * num_sampled > num_running
        seen.num_running = max(num_running, len(seen.outcomes))  # with those that ended in this round
        seen.num_may_speculate, seen.scored = num_may_speculate if may_draft else 0, scored
        seen.num_prompt_rows = batch.num_tokens - num_decoding_rows
        return seen
