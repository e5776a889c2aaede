"""The drafter as the coordinator sees it: what it was told, what it was asked, and what it answered.

Pure bookkeeping around one `Outbox`. A policy says whom to draft for and a control how long the drafts are; this file
only knows which requests can have a draft now. It never starts a target pass and never decides to wait for a draft.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from actors.coordinator.outbox import Outbox
from actors.coordinator.sequence import Sequence
from actors.policy.draft_length import Control
from actors.policy.pipelines import Pipeline
from actors.policy.speculation_switch import Mode
from actors.protocol.draft_tree import DraftTree
from actors.protocol.messages import (
    Commit,
    DraftBatch,
    DraftOrder,
    DraftPreviewBatch,
    Proposal,
    ProposalBatch,
    SamplingKind,
)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Hypotheses of the drafter as far as it told them, and how its proposals are read off: chains or trees."""

    tree: DraftTree
    is_chain: bool

    def behind(self, token_ids: Collection[int]) -> _Prepared | None:
        """What is prepared for this outcome; None if nothing is."""
        node = self.tree.find(tuple(token_ids))
        if node is None or not self.tree.nodes[node].children:
            return None
        return replace(self, tree=self.tree.reroot(node)[0])

    def proposal(self, sequence: Sequence, num_draft_tokens: int) -> Proposal:
        """The best one, tested as tokens that were chosen without randomness."""
        nodes = self.tree.best_chain(num_draft_tokens) if self.is_chain else self.tree.best_nodes(num_draft_tokens)
        sampling_kinds, distributions = (
            (SamplingKind.ROOT, *[SamplingKind.DETERMINISTIC] * len(nodes)),
            (None,) * (len(nodes) + 1),
        )
        return Proposal(
            sequence.request_id,
            sequence.epoch,
            sequence.prefix_len,
            sequence.prefix_hash,
            self.tree.proposal(nodes),
            sampling_kinds,
            distributions,
            prepared=True,
        )


class DrafterSession:
    """`here` is False where no drafter role exists, or none that lives."""

    def __init__(self, pipeline: Pipeline, control: Control, *, here: bool, first_round: int, piece: int) -> None:
        self.here = here
        self.control = control
        self.round = first_round  # of the last batch sent
        self.proposals: dict[int, Proposal] = {}
        self.ordered: dict[int, int] = {}  # draft tokens that were ordered for the present prefix
        self.heard = False  # the first answer to the outstanding orders has come, but not the last
        self.given_up = False  # the target went on without the outstanding answer
        self._pipeline = pipeline
        self._outbox = Outbox()
        self._drafting: dict[int, int] | None = None  # outstanding orders: request -> prefix_len they assume
        self._answered: set[int] = set()  # requests whose order for the present prefix was answered, well or not
        self._catching_up: set[int] = set()  # requests whose text is being read, with nobody waiting
        self._read_in = first_round  # round in which such a text was last told of
        self._piece = piece  # tokens of a text to read between two drafts
        self._is_reading = False  # the outstanding answer comes after such a text
        self._previews: dict[int, _Prepared] = {}  # below the present prefix, whose verdict is awaited
        self._prepared: dict[int, _Prepared] = {}  # what of the last outlook lies behind the verdict
        self.num_taken = 0  # proposals of the outstanding orders that were read off outlooks

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return self._drafting is not None

    @property
    def is_drafting(self) -> bool:
        """Whether the answer to come holds drafts."""
        return bool(self._drafting)

    def must_read(self, running: Collection[Sequence], round_: int) -> bool:
        """Whether to let the drafter read on in this round, if it has time: one piece at most."""
        if not self.control.weighs_waiting or self._read_in >= round_:
            return False
        return bool(self._outbox.unfinished or self._strangers(running))

    def give_up(self) -> None:
        """The target goes on without the answer that is awaited; nobody waits for another one until it is there."""
        self.given_up = True

    def lose(self) -> None:
        """Nothing that was asked will be answered; what a drafter is told next is the whole of it."""
        self.here, self._drafting = False, None
        self.heard = self.given_up = self._is_reading = False
        self._outbox = Outbox()
        for known in (self._answered, self._catching_up, self.ordered, self._previews, self._prepared):
            known.clear()

    def serves(self, sequence: Sequence) -> bool:
        return self.here and sequence.request.speculate

    def admit(self, sequence: Sequence) -> None:
        """The request is about to run. Where it would keep others waiting, the drafter is told when it has time."""
        if self.serves(sequence) and not self.control.weighs_waiting:
            self._outbox.admit(sequence)

    def commit(self, record: Commit) -> None:
        self._outbox.commit(record)
        preview = self._previews.pop(record.request_id, None)
        if preview is not None and (behind := preview.behind(record.token_ids)) is not None:
            self._prepared[record.request_id] = behind

    def release(self, request_id: int) -> None:
        """The request ended or lost its place."""
        self.forget_draft(request_id)
        self._catching_up.discard(request_id)
        self._previews.pop(request_id, None)
        self._outbox.release(request_id)

    def forget_draft(self, request_id: int) -> None:
        """The prefix grew: what was drafted for the old one is of no use."""
        self.proposals.pop(request_id, None)
        self.ordered.pop(request_id, None)
        self._prepared.pop(request_id, None)
        self._answered.discard(request_id)

    def receive_previews(self, batch: DraftPreviewBatch, sequences: Mapping[int, Sequence]) -> None:
        """Keep what is prepared for the verdicts that are awaited; of late ones, and of the old, nothing."""
        for preview in batch.previews:
            sequence = sequences.get(preview.request_id)
            if sequence is not None and sequence.accepts(preview):
                tree = DraftTree.read(preview.tree, preview.values)
                self._previews[preview.request_id] = _Prepared(tree, is_chain=not preview.values)

    def answers(self, batch: ProposalBatch) -> bool:
        """Whether this is what was asked; anything else is stale."""
        return self._drafting is not None and batch.round == self.round

    def take(self, batch: ProposalBatch, sequences: Mapping[int, Sequence]) -> int:
        """Keep the proposals that fit the present text; returns how many do not."""
        num_stale = 0
        for proposal in batch.proposals:
            sequence = sequences.get(proposal.request_id)
            if sequence is not None and sequence.accepts(proposal):
                self.proposals[proposal.request_id] = proposal
            else:
                num_stale += 1
        if batch.num_missing:
            answered = {proposal.request_id: proposal.prefix_len for proposal in batch.proposals}
            self.heard = True
        else:
            answered, self._drafting = self._drafting, None
            self.heard = self.given_up = self._is_reading = False
            self._caught_up()
        for request_id, prefix_len in answered.items():
            sequence = sequences.get(request_id)
            if sequence is not None and sequence.prefix_len == prefix_len:
                self._answered.add(request_id)
        return num_stale

    def expecting(self, running: Collection[Sequence], verifying: Collection[int]) -> list[Sequence]:
        """Who should have a draft before its next pass and has not been answered; `verifying` is with the target."""
        if self.given_up or (self._is_reading and self.control.weighs_waiting):
            return []
        return [
            sequence
            for sequence in running
            if sequence.request_id not in self._answered
            and sequence.request_id not in verifying
            and (self._is_drafted_for(sequence) or self._wanted(sequence))
        ]

    def order(
        self, running: Collection[Sequence], verifying: Collection[int], sequences: Mapping[int, Sequence], round_: int
    ) -> list[DraftBatch]:
        """Tell the drafter what happened and ask for what is missing, unless it is busy; `round_` is the least number.

        Every sequence that only just came or is caught up with is ordered nothing: its text is read meanwhile. Where
        waiting is weighed, texts and drafts are never asked for in one batch.
        """
        if self._drafting is not None:
            return []
        chosen = self._pipeline.choose(self.expecting(running, verifying), len(running))
        orders = [self._order(sequence) for sequence in chosen]
        late = [] if orders and self.control.weighs_waiting else self._enlist(running)
        if not orders and not late and not self._outbox.has_news:
            return []
        admits, commits, releases = self._outbox.flush()
        orders += [DraftOrder(request_id, 0) for request_id in late]
        orders += [DraftOrder(admit.request_id, 0) for admit in admits if admit.request_id in sequences]
        lengths = {order.request_id: order.num_draft_tokens for order in orders if order.num_draft_tokens}
        taken = {order.request_id for order in orders if order.taken is not None}
        self._drafting = {id_: sequences[id_].prefix_len for id_ in lengths if id_ not in taken}
        self.num_taken, self._is_reading = len(taken), bool(late or admits)
        self._read_in = round_ if late else self._read_in
        self.ordered |= lengths
        after, self.round = self.round, max(self.round + 1, round_)
        return [DraftBatch(self.round, admits, commits, releases, tuple(_first_of_each(orders)), after)]

    def _order(self, sequence: Sequence) -> DraftOrder:
        """What is prepared for the verdict is there already; the drafter only has to know what became of it."""
        request_id, wanted = sequence.request_id, self._wanted(sequence)
        prepared = self._prepared.pop(request_id, None)
        if prepared is None or not wanted:
            return DraftOrder(request_id, wanted)
        proposal = prepared.proposal(sequence, wanted)
        self.proposals[request_id] = proposal
        self._answered.add(request_id)
        return DraftOrder(request_id, wanted, proposal.tree)

    def _wanted(self, sequence: Sequence) -> int:
        """Draft tokens to order for a sequence; 0 if it should not be speculated for now."""
        request_id = sequence.request_id
        if not self.serves(sequence) or sequence.uncached_len != 1:
            return 0
        if not self._outbox.knows(request_id) or request_id in self._catching_up:
            return 0
        return self.control.length(request_id, self._pipeline.num_draft_tokens(sequence))

    def _is_drafted_for(self, sequence: Sequence) -> bool:
        """Under way for just this prefix: waited for even if by now nothing would be ordered."""
        asked = self._drafting is not None and self._drafting.get(sequence.request_id) == sequence.prefix_len
        return asked and sequence.uncached_len == 1

    def _enlist(self, running: Collection[Sequence]) -> list[int]:
        """Requests whose text the drafter has to read before it is worth waiting for, while the target goes on.

        Those it does not know, because it was not told or is not the one that was; and after a rest, all but those it
        has just drafted for.
        """
        mode = self.control.mode
        if mode is Mode.rest:
            return []
        here = [sequence for sequence in running if self.serves(sequence)]
        strangers = self._strangers(running)
        begun = [sequence for sequence in here if sequence.request_id in self._outbox.unfinished]
        for sequence in strangers:
            # Drafters remember what a request that comes back had said: that text is told at once.
            self._outbox.admit(sequence, None if sequence.num_generated else self._piece)
        for sequence in begun:
            self._outbox.go_on(sequence, self._piece)
        behind = here if mode is Mode.catch_up else strangers + begun
        late = [sequence.request_id for sequence in behind if sequence.request_id not in self.ordered]
        self._catching_up.update(late)
        return late

    def _strangers(self, running: Collection[Sequence]) -> list[Sequence]:
        return [
            sequence for sequence in running if self.serves(sequence) and not self._outbox.knows(sequence.request_id)
        ]

    def _caught_up(self) -> None:
        unfinished = self._catching_up & self._outbox.unfinished
        if self._catching_up and not unfinished and self.control.mode is Mode.catch_up:
            self.control.caught_up()
        self._catching_up = unfinished


def _first_of_each(orders: list[DraftOrder]) -> list[DraftOrder]:
    """A request that is admitted and drafted for in one batch needs only the larger order, which stands first."""
    return list({order.request_id: order for order in reversed(orders)}.values())[::-1]
