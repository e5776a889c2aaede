"""The coordinator's view of the drafter role: the requests it holds, its pending order, and its answers.

Bookkeeping around one `Outbox`. The policy says how long drafts are and for how many requests to order at a time; this
file knows which requests can have a draft now. It neither starts a target pass nor decides to wait for a draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from actors.coordinator.exports import Exports
from actors.coordinator.outbox import Outbox
from actors.coordinator.sequence import DraftState, PreviewTree, Sequence
from actors.policy.decision import Mode
from actors.policy.policy import Policy
from actors.protocol.messages import (
    Commit,
    DraftBatch,
    DraftOrder,
    DraftPreviewBatch,
    Proposal,
    ProposalBatch,
    TopTokens,
    VerdictBatch,
)

_MOST_UNSENT = 64
"""Passes whose top tokens are kept for a drafter that gets no batch meanwhile."""

MAX_UNREAD = 32
"""Committed tokens that a drafter may have to read before a draft; more are read while the target works."""


@dataclass(slots=True)
class PendingOrder:
    """A batch that the drafter has not answered completely.

    `prefixes` maps requests to the prefix length that their drafts assume. `asked_at` is when the present wait began on
    the coordinator's clock: the batch was sent, or the first part of the answer arrived. `left_at` is where the next
    message of the timeline begins: the batch was sent, or the drafter finished the first part (its clock).
    """

    prefixes: dict[int, int]
    num_prefetched: int
    reads_text: bool
    asked_at: float
    left_at: float
    has_first_part: bool = False
    is_skipped: bool = False
    """The target went on without it; no other draft is waited for until the answer is complete."""


class DrafterSession:
    """`is_present`: a drafter role exists and is alive. `read_chunk`: tokens of a text to read between two drafts.

    `is_attached`: the drafter runs on the target's ranks. It gets no batches of its own; orders go with the target's,
    and drafts come with the verdicts. `is_bridged`: the target sends it hidden states, without which it does not draft.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        is_present: bool,
        first_round: int,
        read_chunk: int,
        is_attached: bool = False,
        is_bridged: bool = False,
    ) -> None:
        self.is_present = is_present or is_attached
        self.is_attached = is_attached
        self.round = first_round  # of the last batch sent
        self.pending: PendingOrder | None = None
        self._policy = policy
        self._outbox = Outbox()
        self._top_tokens: deque[TopTokens] = deque(maxlen=_MOST_UNSENT)
        self._read_chunk = read_chunk
        self._last_read = first_round  # the last round whose batch held text to read
        self._attached_orders: dict[int, int] = {}  # draft tokens ordered with the present pass, by request
        self._has_read_attached = False  # with the last pass, the texts of the requests of a trial
        self.exports = Exports() if is_bridged else None

    def lose(self, sequences: Collection[Sequence]) -> None:
        """The drafter and its state are lost; drafts that arrived before remain valid."""
        self.is_present, self.pending, self._outbox = False, None, Outbox()
        self._top_tokens.clear()
        if self.exports is not None:
            self.exports.end(sequences)
        for sequence in sequences:
            sequence.draft = DraftState(proposal=sequence.draft.proposal)
            sequence.is_being_read, sequence.preview = False, None

    def regain(self, epoch: int) -> None:
        """The drafter serves, without any request."""
        self.is_present = True
        if self.exports is not None:
            self.exports.begin(epoch)

    def may_draft(self, sequence: Sequence) -> bool:
        has_features = self.exports is None or sequence.exported_len is not None
        return self.is_present and sequence.request.speculate and has_features

    # --- state of the drafter -----------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """The request is about to run. Where waiting is weighed, its text is sent later, while the drafter is idle; at
        once where hidden states follow."""
        if self.exports is not None:
            if sequence.request.speculate and self.exports.are_sent:
                sequence.exported_len = 0
                self._outbox.admit(sequence)
            return
        if self.may_draft(sequence) and not self._policy.weighs_waiting and not self.is_attached:
            self._outbox.admit(sequence)

    def commit(self, sequence: Sequence, commit: Commit) -> None:
        """The prefix grew: its draft is obsolete, and a preview may hold a draft for the new prefix."""
        self._outbox.commit(commit)
        sequence.num_unread = 0 if sequence.draft.num_ordered else sequence.num_unread + len(commit.token_ids)
        preview, sequence.preview = sequence.preview, None
        sequence.draft = DraftState(prepared=preview.after(commit.token_ids) if preview is not None else None)

    def add_top_tokens(self, batch: VerdictBatch) -> None:
        """Keep them for the next batch to the drafter; they need no request, so they outlive theirs."""
        if batch.top_tokens is not None and self.is_present:
            self._top_tokens.append(batch.top_tokens)

    def release(self, sequence: Sequence) -> None:
        """The request ended or was preempted."""
        if self.exports is not None:
            self.exports.forget(sequence)
        sequence.draft = DraftState()
        sequence.is_being_read, sequence.preview = False, None
        self._outbox.release(sequence.request_id)

    # --- answers ------------------------------------------------------------------------------------------------------

    def receive_previews(self, batch: DraftPreviewBatch, sequences: Mapping[int, Sequence]) -> None:
        """Keep previews for verdicts still to come; late ones assume an old prefix."""
        for preview in batch.previews:
            sequence = sequences.get(preview.request_id)
            if sequence is not None and sequence.is_current(preview):
                sequence.preview = PreviewTree.read(preview)

    def receive(self, batch: ProposalBatch, pending: PendingOrder, sequences: Mapping[int, Sequence]) -> int:
        """Keep the proposals for present prefixes; returns the number of stale ones."""
        num_stale = 0
        for proposal in batch.proposals:
            sequence = sequences.get(proposal.request_id)
            if sequence is not None and sequence.is_current(proposal):
                sequence.draft.proposal, sequence.draft.is_answered = proposal, True
            else:
                num_stale += 1
        if batch.num_missing:
            pending.has_first_part = True
            return num_stale
        self.pending = None
        if self.exports is not None:
            self.exports.received()
        for request_id, prefix_len in pending.prefixes.items():
            sequence = sequences.get(request_id)
            if sequence is not None and sequence.prefix_len == prefix_len:
                sequence.draft.is_answered = True
        if pending.reads_text:
            self._end_reading(sequences.values())
        return num_stale

    def _end_reading(self, sequences: Collection[Sequence]) -> None:
        reading = [sequence for sequence in sequences if sequence.is_being_read]
        for sequence in reading:
            sequence.is_being_read = sequence.request_id in self._outbox.partial

    # --- of an attached drafter ---------------------------------------------------------------------------------------

    def attached_orders(self, sequences: Collection[Sequence]) -> dict[int, int]:
        """Draft tokens to order with the pass of these sequences, which get a verdict, for the prefix after it."""
        self._attached_orders = {}
        if not self.is_attached or (self._policy.may_end and any(one.draft.proposal for one in sequences)):
            return {}
        if self._policy.mode is Mode.catch_up and self._has_read_attached:
            self._policy.caught_up()
        able = [sequence for sequence in sequences if self.may_draft(sequence)]
        followed = able[: self._policy.num_followed(len(able))]
        self._attached_orders = {
            one.request_id: self._policy.draft_length(one.request_id, one.remaining) for one in followed
        }
        # before a trial, so that its rounds cost what later ones will
        self._has_read_attached = self.reads_attached and bool(followed)
        return self._attached_orders

    @property
    def reads_attached(self) -> bool:
        """Whether the attached drafter reads the texts of `attached_orders`, without drafts."""
        return self._policy.mode is Mode.catch_up

    @property
    def reads_chunks(self) -> bool:
        """Whether it reads the prompts that the target reads: those of requests that are drafted for at once."""
        return self.is_attached and self._policy.mode in (Mode.speculate, Mode.probe)

    def receive_attached(self, batch: ProposalBatch, sequences: Mapping[int, Sequence]) -> int:
        """Keep the drafts that came with a verdict, unless the policy has decided to decode plainly since; returns the
        number of stale ones."""
        num_stale = 0
        for proposal in batch.proposals:
            sequence = sequences.get(proposal.request_id)
            if sequence is None or not sequence.is_current(proposal):
                num_stale += 1
            elif self._policy.draft_length(sequence.request_id, sequence.remaining):
                length = self._attached_orders.get(proposal.request_id, 0)
                sequence.draft = DraftState(num_ordered=length, is_answered=True, proposal=proposal)
        return num_stale

    # --- orders -------------------------------------------------------------------------------------------------------

    def missing_drafts(self, running: Collection[Sequence], verifying: Collection[int]) -> list[tuple[Sequence, int]]:
        """Sequences that should get a draft before their next pass, and the draft tokens to order for each.

        Those that the target is `verifying` are not among them, nor those whose order was answered.
        """
        pending = self.pending
        if self.is_attached or (
            pending is not None and (pending.is_skipped or (pending.reads_text and self._policy.weighs_waiting))
        ):
            return []
        found = []
        for sequence in running:
            if sequence.draft.is_answered or sequence.request_id in verifying or sequence.uncached_len != 1:
                continue
            length = 0
            if self._may_draft_now(sequence):
                length = self._policy.draft_length(sequence.request_id, sequence.remaining)
            if length or (pending is not None and pending.prefixes.get(sequence.request_id) == sequence.prefix_len):
                found.append((sequence, length))
        return found

    def _may_draft_now(self, sequence: Sequence) -> bool:
        """Whether the drafter knows the text, and was sent the hidden states of all but its last token."""
        if not self.may_draft(sequence) or sequence.is_being_read or self._has_to_read(sequence):
            return False
        return self.exports is None or sequence.exported_len == sequence.prefix_len - 1

    def order(
        self, running: Collection[Sequence], verifying: Collection[int], least_round: int, now: float
    ) -> list[DraftBatch]:
        """Order the drafts that are missing, and send what was committed, unless an answer is pending.

        A sequence whose text the drafter has to read first is ordered no tokens. Where waiting is weighed, texts and
        drafts never share a batch.
        """
        if self.pending is not None or self.is_attached:
            return []
        if self._policy.mode is Mode.catch_up and self._has_caught_up(running):
            self._policy.caught_up()
        chosen = self.missing_drafts(running, verifying)[: self._policy.num_orders(len(running))]
        reading = [] if chosen and self._policy.weighs_waiting else self._read_texts(running)
        exports_due = self.exports is not None and self.exports.are_due
        if not chosen and not reading and not self._outbox.is_due and not exports_due:
            return []
        admits, commits, releases = self._outbox.flush()
        orders = {sequence.request_id: self._take_preview_or_order(sequence, length) for sequence, length in chosen}
        exports = self.exports.flush() if self.exports is not None else ()
        partly_read = [s.request_id for s in running if s.exported_len and s.uncached_len > 1] if exports else []
        for request_id in (*reading, *partly_read, *(admit.request_id for admit in admits)):
            orders.setdefault(request_id, DraftOrder(request_id, 0))
        prefixes = {s.request_id: s.prefix_len for s, _ in chosen if not s.draft.is_answered}
        reads_text = bool(reading or (not chosen and (admits or exports)))
        self.pending = PendingOrder(prefixes, len(chosen) - len(prefixes), reads_text, now, now)
        if reading:
            self._last_read = least_round
        after, self.round = self.round, max(self.round + 1, least_round)
        top_tokens, ahead = tuple(self._top_tokens), self._policy.works_ahead
        self._top_tokens.clear()
        return [
            DraftBatch(
                self.round,
                admits,
                commits,
                releases,
                tuple(orders.values()),
                after,
                works_ahead=ahead,
                top_tokens=top_tokens,
                exports=exports,
            )
        ]

    def _take_preview_or_order(self, sequence: Sequence, length: int) -> DraftOrder:
        """The order for one sequence; if a preview held its draft, the drafter only learns which draft was used."""
        draft = sequence.draft
        draft.num_ordered = length
        if draft.prepared is None:
            return DraftOrder(sequence.request_id, length)
        tree = draft.prepared.best(length)
        draft.prepared, draft.is_answered = None, True
        draft.proposal = Proposal.deterministic(
            sequence.request_id, sequence.epoch, sequence.prefix_len, sequence.prefix_hash, tree
        )
        return DraftOrder(sequence.request_id, length, tree)

    def has_text_to_read(self, running: Collection[Sequence], round_: int) -> bool:
        """Whether the drafter should read text while the target works: one chunk a round, where waiting is weighed."""
        if self.is_attached or not self._policy.weighs_waiting or self._last_read >= round_:
            return False
        return bool(self._outbox.partial) or any(self._has_to_read(sequence) for sequence in self._followed(running))

    def _has_to_read(self, sequence: Sequence) -> bool:
        """Whether the drafter does not know the request, or misses too much of its text to draft at once."""
        if sequence.request_id not in self._outbox.known:
            return True
        policy = self._policy
        if not policy.weighs_waiting or sequence.num_unread <= MAX_UNREAD:
            return False
        return policy.mode is Mode.catch_up or policy.draft_length(sequence.request_id, sequence.remaining) > 0

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
            elif not self._has_to_read(sequence):
                continue
            if not sequence.draft.num_ordered:
                sequence.is_being_read, sequence.num_unread = True, 0
                reading.append(sequence.request_id)
        return reading
