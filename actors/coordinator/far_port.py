"""A drafter on ranks that are far away: it is never waited for.

It works ahead and sends what it has prepared all the time, made for a text that has grown by several verdicts when it
arrives. The tree is then read from the node that the verdicts have reached, and a draft of it goes into the next pass.
Where there is none, because the verdicts left the tree or the drafter is lost, a lookup beside the coordinator drafts.
Every verdict leaves for the drafter at once, whether it has answered the batches before or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from actors.coordinator.local_drafts import LocalDrafts
from actors.coordinator.port import Orders, PendingOrder
from actors.coordinator.separate_port import SeparatePort
from actors.coordinator.sequence import Sequence
from actors.policy.decision import Mode
from actors.policy.policy import Policy
from actors.protocol.draft_tree import PreviewTree
from actors.protocol.messages import (
    FAR_REACH,
    Commit,
    DraftBatch,
    DraftOrder,
    DraftPreview,
    DraftPreviewBatch,
    Proposal,
    ProposalBatch,
    TokenTree,
    retract_hash,
)
from actors.protocol.records import replace

MOST_UNANSWERED = 64
"""Batches without an answer: then no more are sent until the drafter answers, so that one that hangs is noticed."""
FAR, LOCAL = "far", "local"
"""The sources of drafts."""


class FarPort(SeparatePort):
    """Drafts come from previews, or from `local`."""

    def __init__(self, policy: Policy, first_round: int, read_chunk: int, local: LocalDrafts) -> None:
        super().__init__(policy, first_round, read_chunk)
        self._local = local
        self._unanswered: dict[int, PendingOrder] = {}
        self._latest: dict[int, DraftPreview] = {}

    def lose(self, sequences: Collection[Sequence]) -> None:
        super().lose(sequences)
        self._unanswered, self._latest = {}, {}

    # --- requests -----------------------------------------------------------------------------------------------------

    def may_draft(self, sequence: Sequence) -> bool:
        """Also while the drafter is lost."""
        return sequence.speculates

    def _can_draft(self, sequence: Sequence) -> bool:
        return self.is_present and super()._can_draft(sequence)

    def admit(self, sequence: Sequence) -> None:
        if self.is_present:
            super().admit(sequence)

    def commit(self, sequence: Sequence, commit: Commit) -> None:
        """The path is that of a proposal which the drafter may not have made."""
        super().commit(sequence, replace(commit, path=()))

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        self._latest.pop(sequence.request_id, None)
        self._local.release(sequence.request_id)

    def source_of(self, proposal: Proposal | None) -> str:
        if proposal is None or proposal.is_forced:
            return ""
        return FAR if proposal.prepared else LOCAL

    # --- proposals ----------------------------------------------------------------------------------------------------

    def order_of(self, batch: ProposalBatch) -> PendingOrder | None:
        return self._unanswered.get(batch.round)

    def receive(self, batch: ProposalBatch, sequences: Mapping[int, Sequence], now: float) -> int:  # noqa: ARG002
        """The drafter has read the batch; what it has drafted comes in previews."""
        if not batch.num_missing:
            self._complete(self._unanswered.pop(batch.round), sequences)
            self.pending = next(reversed(self._unanswered.values()), None)
        return len(batch.proposals)

    def receive_previews(self, batch: DraftPreviewBatch, sequences: Mapping[int, Sequence]) -> None:
        """The last one holds what the ones before did, as far as the drafter knows the verdicts."""
        for preview in batch.previews:
            sequence = sequences.get(preview.request_id)
            if sequence is not None and preview.epoch == sequence.epoch:
                self._latest[preview.request_id] = preview

    def _prepared(self, sequence: Sequence) -> PreviewTree | None:
        """What is known of the drafter's tree below the present prefix."""
        latest = self._latest.pop(sequence.request_id, None)
        if latest is not None and latest.epoch == sequence.epoch:
            since = sequence.token_ids[latest.prefix_len :]
            if latest.prefix_hash == retract_hash(sequence.prefix_hash, since):
                found = PreviewTree.read(latest).after(since)
                if found is not None:
                    return found
        return sequence.draft.prepared

    # --- orders -------------------------------------------------------------------------------------------------------

    def missing_drafts(self, running: Collection[Sequence], verifying: Collection[int]) -> Orders:
        """Every draft is there as soon as it is ordered."""
        found = []
        for one in running:
            if one.draft.is_answered or one.request_id in verifying or one.uncached_len != 1 or not self.may_draft(one):
                continue
            if length := self._policy.draft_length(one.request_id, one.most_draft_tokens):
                found.append((one, length))
        return found

    def order(
        self, running: Collection[Sequence], verifying: Collection[int], least_round: int, now: float
    ) -> list[DraftBatch]:
        chosen = self.missing_drafts(running, verifying)
        self._draft(chosen)
        if not self.is_present or len(self._unanswered) >= MOST_UNANSWERED:
            return []
        if self._policy.mode is Mode.catch_up and self._has_caught_up(running):
            self._policy.caught_up()
        known = [(sequence, length) for sequence, length in chosen if self._can_draft(sequence)]
        is_reading = any(pending.reads_text for pending in self._unanswered.values())
        reading = [] if is_reading else self._read_texts(running)
        if not (known or reading or self._is_due):
            return []
        batch = self._batch(known, reading, running, least_round, now)
        assert self.pending is not None
        self._unanswered[self.round] = self.pending
        self.pending.num_prefetched = sum(sequence.preview is not None for sequence, _ in known)
        self.pending.num_missed = len(known) - self.pending.num_prefetched
        return [replace(batch, streams=True)]

    def _draft(self, chosen: Orders) -> None:
        """Each gets what the drafter has prepared, or else what the lookup finds, if anything."""
        missed = []
        for sequence, length in chosen:
            draft = sequence.draft
            draft.num_ordered, draft.is_answered = length, True
            sequence.preview = prepared = self._prepared(sequence)
            if prepared is not None:
                draft.proposal = Proposal.deterministic(*sequence.prefix, prepared.best(length))
            elif sequence.request.drafter is None:
                missed.append((sequence, length))
        self._local.draft(missed)

    def _take_preview_or_order(self, sequence: Sequence, length: int) -> DraftOrder:  # noqa: ARG002 (has a proposal)
        """What the target verifies, to work ahead of."""
        proposal = sequence.draft.proposal
        tree = TokenTree.root(sequence.token_ids[-1]) if proposal is None else proposal.tree
        return DraftOrder(sequence.request_id, FAR_REACH, tree)

    def has_text_to_read(self, running: Collection[Sequence], round_: int) -> bool:
        return self.is_present and super().has_text_to_read(running, round_)
