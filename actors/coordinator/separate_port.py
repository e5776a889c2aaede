"""A drafter on ranks of its own: which requests it knows, what it has yet to read, and its pending order.

The policy says how long drafts are and for how many requests to order at a time; this file knows which requests can
have a draft now. It neither starts a target pass nor decides to wait for a draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from actors.coordinator.outbox import Outbox
from actors.coordinator.port import DrafterPort, Orders, PendingOrder
from actors.coordinator.sequence import DraftState, Sequence
from actors.policy.decision import Mode
from actors.policy.policy import Policy
from actors.protocol.draft_tree import PreviewTree
from actors.protocol.messages import (
    MOST_READ_WITH_DRAFT,
    Commit,
    DraftBatch,
    DraftOrder,
    DraftPreviewBatch,
    FeatureExport,
    Proposal,
    ProposalBatch,
    TopTokens,
    VerdictBatch,
)
from actors.protocol.records import replace

_MOST_UNSENT = 64
"""Passes whose top tokens are kept for a drafter that gets no batch meanwhile."""


class SeparatePort(DrafterPort):
    """`read_chunk`: tokens of a text to read between two drafts."""

    has_ranks = True
    shows_drafts = True
    """Whether a draft beside plain decoding can show what drafts would bring."""

    def __init__(self, policy: Policy, first_round: int, read_chunk: int) -> None:
        super().__init__(first_round)
        self.is_present = True
        self._policy = policy
        self._outbox = Outbox()
        self._top_tokens: deque[TopTokens] = deque(maxlen=_MOST_UNSENT)
        self._read_chunk = read_chunk
        self._last_read = first_round  # the last round whose batch held text to read
        self._noted: dict[int, PendingOrder] = {}  # batches of drafts that were read off previews, by round

    def lose(self, sequences: Collection[Sequence]) -> None:
        self.is_present, self.pending, self._outbox = False, None, Outbox()
        self._top_tokens.clear()
        self._noted.clear()
        self.scored.lose()
        for sequence in sequences:
            proposal = sequence.draft.proposal
            sequence.draft = DraftState(is_answered=proposal is not None, proposal=proposal)
            sequence.is_being_read, sequence.preview = False, None

    def regain(self, epoch: int) -> None:  # noqa: ARG002 (only a bridge belongs to an epoch)
        self.is_present = True

    # --- requests -----------------------------------------------------------------------------------------------------

    def may_draft(self, sequence: Sequence) -> bool:
        return self.is_present and sequence.speculates

    def admit(self, sequence: Sequence) -> None:
        """Sends the text at once, but where the policy weighs waiting: there while the drafter is idle."""
        if self.may_draft(sequence) and not self._policy.weighs_waiting:
            self._outbox.admit(sequence)

    def commit(self, sequence: Sequence, commit: Commit) -> None:
        """A preview may hold a draft for the new prefix. A path is passed on to the drafter that made the draft, not to
        one that came back since."""
        self._outbox.add_commit(commit if sequence.draft.num_ordered else replace(commit, path=()))
        sequence.num_unread = 0 if sequence.draft.num_ordered else sequence.num_unread + len(commit.token_ids)
        preview, sequence.preview = sequence.preview, None
        sequence.draft = DraftState(prepared=preview.after(commit.token_ids) if preview is not None else None)

    def release(self, sequence: Sequence) -> None:
        sequence.draft = DraftState()
        sequence.is_being_read, sequence.preview = False, None
        self._outbox.release(sequence.request_id)

    # --- proposals ----------------------------------------------------------------------------------------------------

    def receive_previews(self, batch: DraftPreviewBatch, sequences: Mapping[int, Sequence]) -> None:
        for preview in batch.previews:
            sequence = sequences.get(preview.request_id)
            if sequence is not None and sequence.is_current(preview):
                sequence.preview = PreviewTree.read(preview)

    def order_of(self, batch: ProposalBatch) -> PendingOrder | None:
        return self._noted.get(batch.round) or super().order_of(batch)

    def receive(self, batch: ProposalBatch, sequences: Mapping[int, Sequence], now: float) -> int:
        if batch.round in self._noted:
            if not batch.num_missing:
                del self._noted[batch.round]
            return 0
        pending, num_stale = self.pending, 0
        assert pending is not None
        if pending.prefixes:
            self._note_delay(pending, now - pending.asked_at)
            pending.asked_at = now
        pending.left_at = batch.finished
        if self.shows_drafts and not batch.num_missing and (pending.unverified or pending.reads_text):
            self._note_exchange(pending, batch, now)
        if pending.unverified:
            self.scored.answer(batch.proposals, sequences, is_last=not batch.num_missing)
            if not batch.num_missing:
                self.pending = None
            return 0
        for proposal in batch.proposals:
            sequence = sequences.get(proposal.request_id)
            if sequence is not None and sequence.is_current(proposal):
                sequence.draft.proposal, sequence.draft.is_answered = proposal, True
            else:
                num_stale += 1
        if batch.num_missing:
            pending.has_first_part = True
        else:
            self._complete(pending, sequences)
        return num_stale

    def _note_exchange(self, pending: PendingOrder, batch: ProposalBatch, now: float) -> None:
        """How far away the drafter is, and how long its drafts take. Drafts that were drawn for a ratio rule are
        accepted more often than they agree with a text that was drawn apart from them: they show nothing."""
        if any(proposal.distributions for proposal in batch.proposals):
            self.shows_drafts = False
            self.scored.drafts.clear()
            self._policy.saw_exchange(0.0, 0.0, 0)
            return
        drafts = self.scored.drafts.values() if pending.unverified else ()
        longest = max([draft.num_ordered for draft in drafts], default=0)
        busy_s = batch.finished - batch.started - batch.read_s
        self._policy.saw_exchange(now - pending.asked_at - batch.read_s, busy_s, longest)

    def _note_delay(self, pending: PendingOrder, seconds: float) -> None:
        """Drafts, or a part of them, came so long after the order or the part before."""
        self._policy.wait.update_delay(seconds, is_rest=pending.has_first_part)

    def _complete(self, pending: PendingOrder, sequences: Mapping[int, Sequence]) -> None:
        """Everything was answered: what has no draft by now gets none."""
        self.pending = None
        for request_id, prefix_len in pending.prefixes.items():
            sequence = sequences.get(request_id)
            if sequence is not None and sequence.prefix_len == prefix_len:
                sequence.draft.is_answered = True
        if pending.reads_text:
            for sequence in sequences.values():
                sequence.is_being_read = sequence.is_being_read and sequence.request_id in self._outbox.partial

    def end_pass(self, batch: VerdictBatch, sequences: Mapping[int, Sequence]) -> int:  # noqa: ARG002
        """Keep the top tokens for the next batch; they need no request, so they outlive theirs."""
        if batch.top_tokens is not None and self.is_present:
            self._top_tokens.append(batch.top_tokens)
        return 0

    # --- orders -------------------------------------------------------------------------------------------------------

    def missing_drafts(self, running: Collection[Sequence], verifying: Collection[int]) -> Orders:
        pending, policy = self.pending, self._policy
        if pending is not None and (pending.is_skipped or (pending.reads_text and policy.weighs_waiting)):
            return []
        awaited = {} if pending is None else pending.prefixes
        found = []
        for sequence in running:
            if sequence.draft.is_answered or sequence.request_id in verifying or sequence.uncached_len != 1:
                continue
            length = (
                policy.draft_length(sequence.request_id, sequence.most_draft_tokens) if self._can_draft(sequence) else 0
            )
            if length or awaited.get(sequence.request_id) == sequence.prefix_len:
                found.append((sequence, length))
        return found

    def _can_draft(self, sequence: Sequence) -> bool:
        """Whether the drafter knows the text."""
        return self.may_draft(sequence) and not sequence.is_being_read and not self._has_to_read(sequence)

    def order(
        self, running: Collection[Sequence], verifying: Collection[int], least_round: int, now: float
    ) -> list[DraftBatch]:
        """A sequence whose text the drafter has to read first is ordered no tokens. Where waiting is weighed, texts and
        drafts never share a batch."""
        if self.pending is not None:
            return []
        if self._policy.mode is Mode.catch_up and self._has_caught_up(running):
            self._policy.caught_up()
        chosen = self.missing_drafts(running, verifying)[: self._policy.num_orders(len(running))]
        reading = [] if chosen and self._policy.weighs_waiting else self._read_texts(running)
        if self._policy.may_score and not (chosen or reading) and (scored := self._scorable(running)):
            return [self._scored_batch(scored, running, least_round, now)]
        if not (chosen or reading or self._is_due):
            return []
        batch = self._batch(chosen, reading, running, least_round, now)
        pending = self.pending
        assert pending is not None
        if pending.num_prefetched and not (pending.prefixes or pending.reads_text or batch.exports):
            # The next order need not wait for the answer, which brings no draft: it is an exchange away.
            self._noted[self.round], self.pending = pending, None
        return [batch]

    def _scorable(self, running: Collection[Sequence]) -> Orders:
        """Sequences that may get a draft to compare with the text, and its length."""
        found = []
        for sequence in running:
            request_id, length = sequence.request_id, min(self._policy.longest_draft, sequence.most_draft_tokens)
            if not length or not self.may_draft(sequence) or request_id in self._outbox.partial:
                continue
            if not sequence.draft.num_ordered and request_id not in self.scored.drafts:
                found.append((sequence, length))  # no verdict on a draft is to come, and none to be decided by the text
        return found

    def _scored_batch(self, scored: Orders, running: Collection[Sequence], least_round: int, now: float) -> DraftBatch:
        """Orders for drafts that no pass verifies. Unknown texts are sent whole, since a lookup reads them at once."""
        self._policy.begin_scoring()
        for sequence, length in scored:
            if sequence.request_id not in self._outbox.known:
                self._outbox.admit(sequence)
            sequence.num_unread = 0
            self.scored.order(sequence, length)
        batch = self._batch([], [], running, least_round, now)
        pending = self.pending
        assert pending is not None
        pending.reads_text = pending.unverified = True
        orders = tuple([DraftOrder(sequence.request_id, length) for sequence, length in scored])
        return replace(batch, orders=orders, works_ahead=False, unverified=True)

    @property
    def _is_due(self) -> bool:
        """Whether there is something to send without an order."""
        return self._outbox.is_due

    def _batch(
        self, chosen: Orders, reading: list[int], running: Collection[Sequence], least_round: int, now: float
    ) -> DraftBatch:
        if reading:
            self._last_read = least_round
        after, self.round = self.round, max(self.round + 1, least_round)
        admits, commits, releases = self._outbox.flush()
        orders = {sequence.request_id: self._take_preview_or_order(sequence, length) for sequence, length in chosen}
        exports, fed = self._flush_exports(running)
        for request_id in (*reading, *fed, *(admit.request_id for admit in admits)):
            orders.setdefault(request_id, DraftOrder(request_id, 0))
        prefixes = {s.request_id: s.prefix_len for s, _ in chosen if not s.draft.is_answered}
        reads_text = bool(reading or (not chosen and (admits or exports)))
        self.pending = PendingOrder(prefixes, len(chosen) - len(prefixes), reads_text, asked_at=now, left_at=now)
        batch = DraftBatch(
            self.round,
            admits,
            commits,
            releases,
            orders=tuple(orders.values()),
            after=after,
            works_ahead=self._policy.works_ahead,
            top_tokens=tuple(self._top_tokens),
            exports=exports,
            costs=self._policy.costs,
        )
        self._top_tokens.clear()
        return batch

    def _flush_exports(self, running: Iterable[Sequence]) -> tuple[tuple[FeatureExport, ...], list[int]]:  # noqa: ARG002
        """Hidden states to receive with the batch, and the requests whose prompts they let the drafter read further."""
        return (), []

    def _take_preview_or_order(self, sequence: Sequence, length: int) -> DraftOrder:
        """The order for one sequence; if a preview held its draft, the drafter only learns which draft was used."""
        draft = sequence.draft
        draft.num_ordered = length
        if draft.prepared is None:
            return DraftOrder(sequence.request_id, length)
        tree = draft.prepared.best(length)
        draft.prepared, draft.is_answered = None, True
        draft.proposal = Proposal.deterministic(*sequence.prefix, tree)
        return DraftOrder(sequence.request_id, length, tree)

    # --- texts to read ------------------------------------------------------------------------------------------------

    def has_text_to_read(self, running: Collection[Sequence], round_: int) -> bool:
        """One chunk a round, where waiting is weighed."""
        if not self._policy.weighs_waiting or self._last_read >= round_:
            return False
        return bool(self._outbox.partial) or any(self._has_to_read(sequence) for sequence in self._followed(running))

    def _has_to_read(self, sequence: Sequence) -> bool:
        """Whether the drafter does not know the request, or misses too much of its text to draft at once."""
        if sequence.request_id not in self._outbox.known:
            return True
        policy = self._policy
        if not policy.weighs_waiting or sequence.num_unread <= MOST_READ_WITH_DRAFT:
            return False
        return policy.mode is Mode.catch_up or policy.draft_length(sequence.request_id, sequence.most_draft_tokens) > 0

    def _has_caught_up(self, running: Collection[Sequence]) -> bool:
        """Whether the drafter has read the texts of all requests of the coming trial."""
        followed = self._followed(running)
        return bool(followed) and not any(s.is_being_read or self._has_to_read(s) for s in followed)

    def _followed(self, running: Collection[Sequence]) -> list[Sequence]:
        """Requests that drafts are made for, or are about to be; those first whose text was read."""
        able = [sequence for sequence in running if self.may_draft(sequence)]
        count = self._policy.num_followed(len(able))
        return able if count == len(able) else sorted(able, key=self._has_to_read)[:count]

    def _read_texts(self, running: Collection[Sequence]) -> list[int]:
        """Requests whose committed text the drafter reads next, before drafts of it are waited for.

        These are the requests it does not know, or knows in part, and after a rest those of the trial.
        """
        reading = []
        for sequence in self._followed(running):
            if sequence.request_id not in self._outbox.known:
                # A request that comes back is read at once: drafters may remember the text it had generated.
                self._outbox.admit(sequence, None if sequence.num_generated else self._read_chunk)
            elif sequence.request_id in self._outbox.partial:
                self._outbox.extend(sequence, self._read_chunk)
            elif sequence.draft.num_ordered or not self._has_to_read(sequence):
                continue
            sequence.is_being_read, sequence.num_unread = True, 0
            reading.append(sequence.request_id)
        return reading
