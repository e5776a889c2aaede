"""Drafters that several pools lend at a time: which of them drafts for which request.

Each lease is a role of its own, with a port as if there were no other (`separate_port.py`); this file divides the
requests among them. A request goes to the lease with the fewest requests, of those that draft about as fast as the
fastest: by the tokens that their drafts brought, and the seconds for which these were waited for. It moves when its
lease is lost or has become slow, and its text is read again. A lease that was slow is tried again, with requests to
come, after some hundred verdicts elsewhere. It knows neither pools nor addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from actors.coordinator.port import DrafterPort, Orders, PendingOrder
from actors.coordinator.scored_drafts import ScoredDrafts
from actors.coordinator.separate_port import SeparatePort
from actors.coordinator.sequence import Sequence
from actors.policy.estimators import Ewma
from actors.policy.policy import Policy
from actors.protocol.messages import Commit, DraftBatch, DraftPreviewBatch, ProposalBatch
from actors.protocol.records import replace
from actors.topology import seat_of

FAST_ENOUGH = 0.8
"""Tokens per second against the fastest lease, below which no request stays: a move costs the reading of a text."""
RETRY = 256
"""Verdicts on drafts of other leases after which what is known of one is forgotten."""
_KNOWN = 6.0
"""Weight of the observations from which on a lease is judged."""


class LeasedPort(SeparatePort):
    """One lease, for the `requests` that are placed there; those of other leases are nothing to it."""

    shows_drafts = False

    def __init__(self, policy: Policy, first_round: int, read_chunk: int, seat: int) -> None:
        super().__init__(policy, first_round, read_chunk)
        self.requests: set[int] = set()
        self.num_elsewhere = 0
        self._seat = seat
        self.forget()

    def forget(self) -> None:
        """What is known of its speed."""
        self.num_elsewhere = 0
        self.delay_s = Ewma()
        """Seconds from an order to its drafts; 0 for drafts that were shown before their verdict."""
        self.num_accepted = Ewma()
        """Draft tokens accepted, by verdict."""

    @property
    def is_known(self) -> bool:
        return min(self.delay_s.weight, self.num_accepted.weight) >= _KNOWN

    def tokens_per_s(self, pass_s: float) -> float:
        """Tokens per second of a request, where a target pass takes so long."""
        return (1.0 + self.num_accepted.mean) / max(1e-9, pass_s + self.delay_s.mean)

    def own(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        return [sequence for sequence in sequences if sequence.request_id in self.requests]

    def lose(self, sequences: Collection[Sequence]) -> None:
        super().lose(self.own(sequences))
        self.forget()

    def receive(self, batch: ProposalBatch, sequences: Mapping[int, Sequence], now: float) -> int:
        return super().receive(batch, self._own_by_id(sequences), now)

    def _note_delay(self, pending: PendingOrder, seconds: float) -> None:
        super()._note_delay(pending, seconds)
        if not pending.has_first_part:
            self.delay_s.update(seconds)

    def receive_previews(self, batch: DraftPreviewBatch, sequences: Mapping[int, Sequence]) -> None:
        super().receive_previews(batch, self._own_by_id(sequences))

    def _own_by_id(self, sequences: Mapping[int, Sequence]) -> dict[int, Sequence]:
        return {number: sequences[number] for number in self.requests if number in sequences}

    def _batch(
        self, chosen: Orders, reading: list[int], running: Collection[Sequence], least_round: int, now: float
    ) -> DraftBatch:
        batch = super()._batch(chosen, reading, running, least_round, now)
        if self.pending is not None and self.pending.num_prefetched:
            self.delay_s.update(0.0, self.pending.num_prefetched)
        return replace(batch, seat=self._seat)


class PoolsPort(DrafterPort):
    """`num_seats` leases, any of which may be absent."""

    has_ranks = True

    def __init__(self, policy: Policy, first_round: int, read_chunk: int, num_seats: int) -> None:
        self._policy, self.num_seats = policy, num_seats
        self._ports = [LeasedPort(policy, first_round, read_chunk, seat) for seat in range(num_seats)]
        self._places: dict[int, LeasedPort] = {}
        self.scored = ScoredDrafts()  # none: a lease is not asked for drafts that no pass verifies

    def of(self, role: str) -> LeasedPort:
        return self._ports[seat_of(role)]

    @property
    def round(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  (read outside alone)
        return max(port.round for port in self._ports)

    @property
    def is_present(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(port.is_present for port in self._ports)

    @property
    def pending(self) -> PendingOrder | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The order to wait for: one that was not skipped, of drafts, rather than of a text to read, and of these one
        without any answer, rather than one whose rest may not be worth a wait."""
        return min(
            self.unanswered,
            key=lambda order: (order.is_skipped, not order.prefixes, order.has_first_part),
            default=None,
        )

    @property
    def unanswered(self) -> list[PendingOrder]:
        return [port.pending for port in self._ports if port.pending is not None]

    # --- requests -----------------------------------------------------------------------------------------------------

    def may_draft(self, sequence: Sequence) -> bool:
        port = self._places.get(sequence.request_id)
        return any(one.may_draft(sequence) for one in ([port] if port is not None else self._ports))

    def admit(self, sequence: Sequence) -> None:
        if self.may_draft(sequence):
            self._place(sequence, self._fast_enough()).admit(sequence)

    def commit(self, sequence: Sequence, commit: Commit) -> None:
        place = self._places.get(sequence.request_id)
        if place is None:
            super().commit(sequence, commit)
            return
        if sequence.draft.num_ordered:
            place.num_accepted.update(len(commit.path))
            self._count_elsewhere(place)
        place.commit(sequence, commit)

    def release(self, sequence: Sequence) -> None:
        place = self._places.pop(sequence.request_id, None)
        if place is None:
            super().release(sequence)
            return
        place.release(sequence)
        place.requests.discard(sequence.request_id)

    def _count_elsewhere(self, place: LeasedPort) -> None:
        place.num_elsewhere = 0
        for port in self._ports:
            port.num_elsewhere += port is not place
            if port.num_elsewhere >= RETRY:
                port.forget()

    def _place(self, sequence: Sequence, ports: Collection[LeasedPort]) -> LeasedPort:
        """Place the request at the one of these with the fewest, and where several have as few, at one that is not
        known yet, or else at the fastest: requests one after the other would all be the first pool's."""
        pass_s = self._policy.wait.pass_s
        place = min(ports, key=lambda port: (len(port.requests), port.is_known, -port.tokens_per_s(pass_s)))
        place.requests.add(sequence.request_id)
        self._places[sequence.request_id] = place
        return place

    def _fast_enough(self) -> list[LeasedPort]:
        """Leases that requests may stay at; what is not known may be fast."""
        present = [port for port in self._ports if port.is_present]
        pass_s = self._policy.wait.pass_s
        speeds = {id(port): port.tokens_per_s(pass_s) for port in present if port.is_known}
        least = FAST_ENOUGH * max(speeds.values(), default=0.0)
        return [port for port in present if speeds.get(id(port), least) >= least]

    def _settle(self, running: Collection[Sequence], verifying: Collection[int]) -> None:
        """Move requests from leases that are lost or slow. One whose draft came, or is being verified, stays until the
        verdict: the accepted path means nothing to another lease."""
        ports = self._fast_enough()
        for sequence in running if ports else ():
            place = self._places.get(sequence.request_id)
            is_drafted = sequence.draft.proposal is not None or sequence.request_id in verifying
            if place in ports or is_drafted or not sequence.speculates:
                continue
            self.release(sequence)
            self._place(sequence, ports).admit(sequence)

    # --- orders -------------------------------------------------------------------------------------------------------

    def has_text_to_read(self, running: Collection[Sequence], round_: int) -> bool:
        return any(port.has_text_to_read(port.own(running), round_) for port in self._ports)

    def order(
        self, running: Collection[Sequence], verifying: Collection[int], least_round: int, now: float
    ) -> list[DraftBatch]:
        self._settle(running, verifying)
        batches: list[DraftBatch] = []
        for port in self._ports:
            batches += port.order(port.own(running), verifying, least_round, now)
        return batches

    def missing_drafts(self, running: Collection[Sequence], verifying: Collection[int]) -> Orders:
        found: Orders = []
        for port in self._ports:
            found += port.missing_drafts(port.own(running), verifying)
        return found
