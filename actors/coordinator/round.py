"""The present round: from one verdict to the next. Bookkeeping of times that the caller read; decides nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Series

from actors.coordinator.sequence import Sequence
from actors.policy.acceptance import DraftOutcome
from actors.policy.decision import Mode
from actors.policy.policy import RoundObservation
from actors.protocol.messages import Commit, Proposal, ProposalBatch, VerdictBatch, VerifyItem

Result = tuple[Commit, int, Proposal | None]
"""A verdict that was committed, the draft tokens that had been ordered for it, and the proposal that it was on."""


class Round:
    """What happens between two verdicts, as far as it is known: an attribute that is not set yet is its class's.

    Once it has ended it does not change any more, so that what it teaches is computed later, of several together.
    """

    verifying: set[int] | None = None
    """The requests that await a verdict of the outstanding pass; None while no pass is outstanding."""
    fed: Series[VerifyItem] = ()
    """All requests of that pass, also those that it reads a part of; none once it is known to have failed."""
    admitted: Series[tuple[Sequence, int]] = ()
    """The requests that the target is sent first with that pass, and their epochs."""
    proposals: Mapping[int, Proposal | None] = {}
    """Those of this pass, by request, also of requests that have ended since."""
    sent_at = 0.0
    """When the batch of this pass left."""
    first_part: VerdictBatch | None = None
    """The verdicts of this pass, which are committed, where drafts behind them are yet to come."""
    num_counted = 0
    """Number of `results` that were counted with them, before the end."""
    unverified = False
    """The drafts that an attached drafter makes behind this pass are only compared with the text."""
    serves_drafts = False
    """The pass also computes what an attached drafter drafts from."""
    skipped_drafts = False
    """Drafts had been ordered, but the pass did not wait for them."""
    draft_s = 0.0
    """The time in which the target idled while the drafter worked, and `read_s` the part of it that was reading."""
    read_s = 0.0
    drafted_before_s = 0.0
    """Time that an attached drafter took for this round's drafts, at the end of the round before."""
    unused_s = 0.0
    """Time that it took for drafts that no pass verifies, since the policy decodes plainly by now."""
    scored_s = 0.0
    """Time that any drafter took for drafts that are only compared with the text."""
    scored: Collection[DraftOutcome] = ()
    """Such drafts that the texts have decided."""
    is_test = False
    """It is the test of a single request, after one of its passes has failed."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.results: list[Result] = []

    def add_drafting(self, drafts: ProposalBatch, *, is_used: bool, unverified: bool) -> None:
        """An attached drafter worked before this round; `is_used`: a draft of it may be verified."""
        seconds = drafts.finished - drafts.started
        if unverified:
            self.scored_s = seconds
        elif is_used:
            self.draft_s, self.drafted_before_s, self.read_s = seconds, seconds, drafts.read_s
        else:
            self.unused_s = seconds

    def add_wait(self, batch: ProposalBatch) -> None:
        """The drafter answered while the target idles; a pass of draft-ahead that the round's start cut also counts."""
        self.draft_s += batch.finished - batch.started
        self.read_s += batch.read_s
        for started, finished, _ in batch.ahead:
            self.draft_s += max(0.0, finished - max(started, self.started))

    def end(
        self, batch: VerdictBatch, now: float, running: Collection[Sequence], mode: Mode, *, may_draft: bool
    ) -> None:
        """Its verdicts came, and these sequences go on; `mode` is the policy's, `may_draft`: there is a drafter."""
        self.batch, self.ended, self.mode = batch, now, mode
        num_sampled = num_tokens = num_may_speculate = 0
        for sequence in running:
            num_sampled += sequence.is_sampled
            num_tokens += len(sequence.token_ids)
            num_may_speculate += sequence.speculates
        self.num_running, self.num_sampled, self.num_tokens = len(running), num_sampled, num_tokens
        self.num_may_speculate = num_may_speculate if may_draft else 0

    @property
    def seconds(self) -> float:
        """How long it took, with its own drafts: those that came with its verdicts are of the next round."""
        batch = self.batch
        return self.ended - self.started - (batch.left_at - batch.finished) + self.drafted_before_s

    def observation(self) -> RoundObservation:
        """What the policy learns from the round that has ended."""
        batch, num_running = self.batch, max(1, self.num_running)
        num_decoding_rows = len(batch.verdicts)
        for verdict in batch.verdicts:
            if (proposal := self.proposals.get(verdict.request_id)) is not None:
                num_decoding_rows += proposal.tree.num_draft_tokens
        outcomes = [_outcome(*result) for result in self.results]
        return RoundObservation(
            self.seconds,
            batch.finished - batch.started,
            self.draft_s,
            max(num_running, len(outcomes)),  # with those that ended in this round
            self.num_tokens / num_running,
            self.num_may_speculate,
            batch.num_tokens - num_decoding_rows,
            outcomes,
            self.skipped_drafts,
            2 * self.num_sampled > num_running,
            self.read_s,
            self.unused_s,
            self.serves_drafts,
            self.scored,
            self.scored_s,
        )


def _outcome(commit: Commit, num_ordered: int, proposal: Proposal | None) -> DraftOutcome:
    """What a verdict says of the drafter: of what a grammar forced, nothing."""
    if proposal is None or proposal.is_forced or not (size := proposal.tree.num_draft_tokens):
        return DraftOutcome(commit.request_id, num_ordered, ())
    return DraftOutcome(commit.request_id, num_ordered, commit.path, len(commit.token_ids), max(0, num_ordered - size))
