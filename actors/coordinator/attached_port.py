"""A drafter on the target's ranks: orders go with the target's passes, and drafts come with the verdicts.

It has no batches of its own and its role cannot be lost without the target's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from actors.coordinator.port import DrafterPort, PassOrders
from actors.coordinator.scheduler import Demand
from actors.coordinator.sequence import DraftState, Sequence
from actors.policy.decision import Mode
from actors.policy.policy import Policy
from actors.protocol.messages import UNKNOWN_COSTS, VerdictBatch


class AttachedPort(DrafterPort):
    """Drafts are ordered for the prefix after the verdict."""

    is_present = True

    def __init__(self, policy: Policy, first_round: int) -> None:
        super().__init__(first_round)
        self._policy = policy
        self._lengths: dict[int, int] = {}  # draft tokens ordered with the present pass, by request
        self._has_read = False  # with the last pass, the texts of the requests of a trial
        self._is_scoring = False  # no pass verifies the drafts that are ordered with the present one

    def may_draft(self, sequence: Sequence) -> bool:
        return sequence.speculates

    def begin_pass(self, rows: Collection[Demand], sequences: Collection[Sequence]) -> PassOrders:  # noqa: ARG002
        """Chunks of prompts are read beside the target where drafts follow at once; texts before a trial without
        drafts, so that its rounds cost what later ones will."""
        policy, reached, reading = self._policy, list[Sequence](), list[int]()
        for sequence, num_rows, _ in rows:
            is_part = num_rows < len(sequence.token_ids) - sequence.cached_len
            if is_part:
                reading.append(sequence.request_id)
            if sequence.may_hit or not is_part:
                reached.append(sequence)
        self._is_scoring = policy.may_score and not any(sequence.draft.proposal for sequence in reached)
        self._lengths = lengths = self._order(reached)
        if policy.mode is Mode.catch_up:
            reading = [*lengths]
        elif policy.mode is not Mode.speculate and policy.mode is not Mode.probe:
            reading = []
        return PassOrders(
            lengths, reading, costs=policy.costs if lengths else UNKNOWN_COSTS, unverified=self._is_scoring
        )

    def _order(self, reached: list[Sequence]) -> dict[int, int]:
        """Draft tokens for these sequences, which get a verdict; none while a verdict may end speculation."""
        policy = self._policy
        if self._is_scoring:
            self._has_read = False
            policy.begin_scoring()
            able = [one for one in reached if one.speculates and one.request_id not in self.scored.drafts]
            lengths = {one.request_id: min(policy.longest_draft, one.most_draft_tokens) for one in able}
            return {request_id: length for request_id, length in lengths.items() if length}
        if policy.may_end and any(sequence.draft.proposal for sequence in reached):
            return {}
        if policy.mode is Mode.catch_up and self._has_read:
            policy.caught_up()
        able = [sequence for sequence in reached if sequence.speculates]
        del able[policy.num_followed(len(able)) :]
        self._has_read = policy.mode is Mode.catch_up and bool(able)
        return {one.request_id: policy.draft_length(one.request_id, one.most_draft_tokens) for one in able}

    def end_pass(self, batch: VerdictBatch, sequences: Mapping[int, Sequence]) -> int:
        """Keep the drafts, unless the policy has decided to decode plainly since."""
        num_stale, proposals, policy = 0, batch.drafts.proposals if batch.drafts is not None else (), self._policy
        if self._is_scoring:
            for request_id, length in self._lengths.items():
                if (sequence := sequences.get(request_id)) is not None:
                    self.scored.order(sequence, length)
            self.scored.answer(proposals, sequences)
            return 0
        for proposal in proposals:
            sequence = sequences.get(proposal.request_id)
            if sequence is None or not sequence.is_current(proposal) or sequence.draft.proposal is not None:
                num_stale += 1  # also where a grammar has made a draft
            elif policy.draft_length(sequence.request_id, sequence.most_draft_tokens):
                sequence.draft = DraftState(self._lengths.get(proposal.request_id, 0), True, proposal)
        return num_stale
