"""The port between the rounds of the coordinator and a drafter: orders go in, proposals come out.

The state machine says what happened to requests and roles, and asks for the orders that are due; a proposal comes out
as `Sequence.draft`. Each kind of drafter is one file, which `open_port` loads alone: none (here), on the target's ranks
(`attached_port.py`), on ranks of its own (`separate_port.py`), there and fed with the target's hidden states
(`bridged_port.py`), far away (`far_port.py`), and lent by several pools (`pools_port.py`). A port must not know how
rounds follow each other, whether a draft is waited for, or which algorithm drafts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from actors.coordinator.scheduler import Demand
from actors.coordinator.scored_drafts import ScoredDrafts
from actors.coordinator.sequence import DraftState, Sequence
from actors.protocol.messages import (
    UNKNOWN_COSTS,
    Commit,
    DraftBatch,
    DraftPreviewBatch,
    MeasuredCosts,
    Proposal,
    ProposalBatch,
    VerdictBatch,
)

if TYPE_CHECKING:
    from actors.coordinator.local_drafts import LocalDrafts
    from actors.policy.policy import Policy

Orders = list[tuple[Sequence, int]]
"""Sequences and the draft tokens to order for each."""


@dataclass(slots=True)
class PendingOrder:
    """A batch that the drafter has not answered completely."""

    prefixes: dict[int, int]
    """The requests that await a draft, and the prefix length that it assumes."""
    num_prefetched: int
    """Further drafts of the batch, which were read off previews."""
    reads_text: bool
    """Whether the drafter also reads text."""
    asked_at: float
    """When the present wait began on the coordinator's clock: the batch was sent, or the first part of the answer
    arrived."""
    left_at: float
    """Where the next message of the timeline begins: the batch was sent, or the drafter finished the first part (its
    clock)."""
    has_first_part: bool = False
    is_skipped: bool = False
    """The target went on without it; no other draft is waited for until the answer is complete."""
    num_missed: int = 0
    """Requests for which nothing was prepared, and for which no draft was waited."""
    unverified: bool = False
    """Its drafts are only compared with the text, and not waited for."""


class PassOrders(NamedTuple):
    """What a pass of the target does for the drafter, as fields of `VerifyBatch` and `VerifyItem`."""

    lengths: Mapping[int, int] = MappingProxyType({})
    """Draft tokens to draft right after the verdict, by request."""
    reading: Collection[int] = ()
    """Requests whose text is read for drafts."""
    bridge: int = 0
    num_received: int = 0
    costs: MeasuredCosts = UNKNOWN_COSTS
    unverified: bool = False


NOTHING_ORDERED = PassOrders()


class DrafterPort:
    """No drafter: nothing is ordered, and every proposal is stale. `round` is that of the last batch sent.

    Other kinds replace what is different for them.
    """

    is_present = False
    """Whether there is a drafter, and it is alive."""
    has_ranks = False
    """Whether it has ranks of its own, which are sent batches."""
    pending: PendingOrder | None = None
    num_seats = 1
    """Roles that draft for the target, each for a part of the requests."""

    def __init__(self, first_round: int = 0) -> None:
        self.round = first_round
        self.scored = ScoredDrafts()

    @property
    def unanswered(self) -> list[PendingOrder]:
        """Every order that is not answered: `pending`, and of several pools the others beside it."""
        return [] if self.pending is None else [self.pending]

    def of(self, role: str) -> DrafterPort:
        """The port of this role: there is one, but where several pools lend their drafters."""
        return self

    # --- the drafter's role -------------------------------------------------------------------------------------------

    def lose(self, sequences: Collection[Sequence]) -> None:
        """The drafter and its state are lost; drafts that arrived before remain valid."""

    def regain(self, epoch: int) -> None:
        """The drafter serves, without any request."""

    # --- requests -----------------------------------------------------------------------------------------------------

    def may_draft(self, sequence: Sequence) -> bool:
        return False

    def admit(self, sequence: Sequence) -> None:
        """The request is about to run."""

    def commit(self, sequence: Sequence, commit: Commit) -> None:
        """The prefix grew: its draft is obsolete."""
        sequence.draft = DraftState()

    def release(self, sequence: Sequence) -> None:
        """The request ended or was preempted."""
        sequence.draft = DraftState()

    def source_of(self, proposal: Proposal | None) -> str:
        """Which of several drafters has made it, for the counters; "" where there is one."""
        return ""

    # --- orders -------------------------------------------------------------------------------------------------------

    def unusable(self, running: Collection[Sequence]) -> Collection[Sequence]:
        """Requests whose rows the target has to compute again before they can be drafted for."""
        return ()

    def has_text_to_read(self, running: Collection[Sequence], round_: int) -> bool:
        """Whether the drafter should read text while the target works on this round."""
        return False

    def order(
        self, running: Collection[Sequence], verifying: Collection[int], least_round: int, now: float
    ) -> list[DraftBatch]:
        """Batches for ranks of the drafter's own, with the drafts that are missing and what was committed."""
        return []

    def missing_drafts(self, running: Collection[Sequence], verifying: Collection[int]) -> Orders:
        """Sequences that should get a draft before their next pass, and the draft tokens to order for each.

        Those that the target is `verifying` are not among them, nor those whose order was answered.
        """
        return []

    def begin_pass(self, rows: Collection[Demand], sequences: Collection[Sequence]) -> PassOrders:
        """The target is about to compute these rows; `sequences` are all requests, running or waiting."""
        return NOTHING_ORDERED

    # --- proposals ----------------------------------------------------------------------------------------------------

    def order_of(self, batch: ProposalBatch) -> PendingOrder | None:
        """The unanswered order to which this is an answer; None if there is none."""
        return self.pending if batch.round == self.round else None

    def receive(self, batch: ProposalBatch, sequences: Mapping[int, Sequence], now: float) -> int:
        """The answer to the pending order, or a part of it; returns the number of stale proposals."""
        return len(batch.proposals)

    def receive_previews(self, batch: DraftPreviewBatch, sequences: Mapping[int, Sequence]) -> None:
        """Keep previews for verdicts still to come; late ones assume an old prefix."""

    def end_pass(self, batch: VerdictBatch, sequences: Mapping[int, Sequence]) -> int:
        """What came with verdicts that were committed; returns the number of stale proposals."""
        return 0


def open_port(
    policy: Policy,
    read_chunk: int,
    *,
    drafts: bool,
    attached: bool = False,
    bridged: bool = False,
    num_seats: int = 1,
    first_round: int = 0,
    local_drafter: str | LocalDrafts = "none",
) -> DrafterPort:
    """`drafts`: there are ranks of the drafter's own, which are sent hidden states if it is `bridged`; with `attached`
    the target's ranks draft; of more than one of `num_seats` each is lent by a pool. With a `local_drafter` its drafts
    are not waited for."""
    if attached:
        from actors.coordinator.attached_port import AttachedPort

        return AttachedPort(policy, first_round)
    if not drafts:
        return DrafterPort(first_round)
    if bridged:
        from actors.coordinator.bridged_port import BridgedPort

        return BridgedPort(policy, first_round, read_chunk)
    if num_seats > 1:
        from actors.coordinator.pools_port import PoolsPort

        return PoolsPort(policy, first_round, read_chunk, num_seats)
    if local_drafter != "none":
        from actors.coordinator.far_port import FarPort
        from actors.coordinator.local_drafts import LocalDrafts

        local = LocalDrafts.of(local_drafter) if isinstance(local_drafter, str) else local_drafter
        return FarPort(policy, first_round, read_chunk, local)
    from actors.coordinator.separate_port import SeparatePort

    return SeparatePort(policy, first_round, read_chunk)
