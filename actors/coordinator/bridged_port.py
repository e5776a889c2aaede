"""A drafter on ranks of its own that drafts from the target's hidden states: which were sent, and which arrived.

The tensors go rank to rank; this is their bookkeeping. A drafter can use those of a request only if none is missing
from its first token on: a request whose hidden states have a gap is preempted once they can be sent, and computed
again. A target that is far ahead of the drafter stops sending, so that what it keeps is bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from actors.coordinator.port import PassOrders, PendingOrder
from actors.coordinator.scheduler import Demand
from actors.coordinator.separate_port import SeparatePort
from actors.coordinator.sequence import Sequence
from actors.policy.policy import Policy
from actors.protocol.messages import FeatureExport, VerdictBatch

MOST_UNRECEIVED = 64
"""Tensors that the drafter has not answered for; then no more are sent until it has received these."""
DUE_TENSORS, DUE_ROWS = 16, 128
"""Sent to the drafter without an order by then: a chunk of a prompt at once, so that the drafter reads it while the
target reads the next one."""


class BridgedPort(SeparatePort):
    """The drafter has to receive hidden states over the present bridge, 0 for none."""

    shows_drafts = False

    def __init__(self, policy: Policy, first_round: int, read_chunk: int) -> None:
        super().__init__(policy, first_round, read_chunk)
        self._bridge = 0
        self._num_sent = 0  # announced to the coordinator
        self._num_flushed = 0  # of them, announced to the drafter
        self._num_received = 0
        self._unsent: list[FeatureExport] = []

    @property
    def _sends(self) -> bool:
        """Whether the next pass sends hidden states."""
        return bool(self._bridge) and self._num_sent - self._num_received < MOST_UNRECEIVED

    def lose(self, sequences: Collection[Sequence]) -> None:
        """The drafter or the bridge is lost."""
        super().lose(sequences)
        self._bridge, self._unsent = 0, []
        for sequence in sequences:
            sequence.exported_len = None

    def regain(self, epoch: int) -> None:
        """The drafter is back, and the bridge stands."""
        super().regain(epoch)
        self._bridge = epoch
        self._num_sent = self._num_flushed = self._num_received = 0
        self._unsent = []

    # --- requests -----------------------------------------------------------------------------------------------------

    def may_draft(self, sequence: Sequence) -> bool:
        return super().may_draft(sequence) and sequence.exported_len is not None

    def _can_draft(self, sequence: Sequence) -> bool:
        """It was also sent the hidden states of all but the last token."""
        return super()._can_draft(sequence) and sequence.exported_len == sequence.prefix_len - 1

    def admit(self, sequence: Sequence) -> None:
        """Admits at once, since hidden states follow."""
        if sequence.speculates and self._sends:
            sequence.exported_len = 0
            self._outbox.admit(sequence)

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        sequence.exported_len = None
        for i, export in enumerate(self._unsent):
            spans = [(None if one == sequence.request_id else one, *place) for one, *place in export.spans]
            self._unsent[i] = replace(export, spans=tuple(spans))

    # --- passes -------------------------------------------------------------------------------------------------------

    def unusable(self, running: Collection[Sequence]) -> Collection[Sequence]:
        """Their hidden states can be sent now, and were not."""
        if not self._sends or self._unsent:
            return ()
        return [one for one in running if one.speculates and one.exported_len is None]

    def begin_pass(self, rows: Collection[Demand], sequences: Collection[Sequence]) -> PassOrders:  # noqa: ARG002
        if not self._sends:
            for sequence in sequences:
                sequence.exported_len = None
        return PassOrders(bridge=self._bridge if self._sends else 0, num_received=self._num_received)

    def end_pass(self, batch: VerdictBatch, sequences: Mapping[int, Sequence]) -> int:
        """What the pass has sent; what is not wanted any more is marked, but has to be received all the same."""
        export = batch.export
        if export is not None and export.bridge == self._bridge:
            self._num_sent += 1
            spans = [(self._extend(sequences, *span), *span[1:]) for span in export.spans]
            self._unsent.append(replace(export, spans=tuple(spans)))
        return super().end_pass(batch, sequences)

    def _extend(self, sequences: Mapping[int, Sequence], request_id: int | None, start: int, count: int) -> int | None:
        """The request, if these rows continue what was sent of it."""
        sequence = None if request_id is None else sequences.get(request_id)
        if sequence is None or sequence.exported_len != start:
            return None
        sequence.exported_len = start + count
        return request_id

    # --- orders -------------------------------------------------------------------------------------------------------

    @property
    def _is_due(self) -> bool:
        unsent = self._unsent
        return super()._is_due or len(unsent) >= DUE_TENSORS or sum([one.num_rows for one in unsent]) >= DUE_ROWS

    def _flush_exports(self, running: Iterable[Sequence]) -> tuple[tuple[FeatureExport, ...], list[int]]:
        unsent, self._unsent = tuple(self._unsent), []
        self._num_flushed += len(unsent)
        return unsent, [
            one.request_id for one in running if one.exported_len and one.uncached_len > 1
        ] if unsent else []

    def _complete(self, pending: PendingOrder, sequences: Mapping[int, Sequence]) -> None:
        """The drafter has received the tensors of its last batch."""
        super()._complete(pending, sequences)
        self._num_received = self._num_flushed
