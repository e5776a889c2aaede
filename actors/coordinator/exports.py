"""The hidden states that the target sends to a drafter on ranks of its own: which, and what is known of their arrival.

The tensors go rank to rank; this is their bookkeeping. A drafter can use those of a request only if none is missing
from its first token on: a request whose hidden states have a gap is preempted once they can be sent, and computed
again. A target that is far ahead of the drafter stops sending, so that what it keeps is bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from actors.coordinator.sequence import Sequence
from actors.protocol.messages import FeatureExport, VerdictBatch

MOST_UNRECEIVED = 64
"""Tensors that the drafter has not answered for; then no more are sent until it has received these."""
DUE_TENSORS, DUE_ROWS = 16, 128
"""Sent to the drafter without an order by then: a chunk of a prompt at once, so that the drafter reads it while the
target reads the next one."""


class Exports:
    """Of the present bridge."""

    def __init__(self) -> None:
        self._bridge = 0
        self._num_sent = 0  # announced to the coordinator
        self._num_flushed = 0  # of them, announced to the drafter
        self._num_received = 0
        self._unsent: list[FeatureExport] = []

    @property
    def are_sent(self) -> bool:
        """Whether the next pass sends hidden states."""
        return bool(self._bridge) and self._num_sent - self._num_received < MOST_UNRECEIVED

    @property
    def are_due(self) -> bool:
        unsent = self._unsent
        return len(unsent) >= DUE_TENSORS or sum([export.num_rows for export in unsent]) >= DUE_ROWS

    def begin(self, bridge: int) -> None:
        """The drafter is back, and the bridge stands."""
        self._bridge = bridge
        self._num_sent = self._num_flushed = self._num_received = 0
        self._unsent = []

    def end(self, sequences: Collection[Sequence]) -> None:
        """The drafter or the bridge is lost."""
        self._bridge, self._unsent = 0, []
        for sequence in sequences:
            sequence.exported_len = None

    def missing(self, running: Collection[Sequence]) -> list[Sequence]:
        """Requests to preempt: their hidden states can be sent now, and were not."""
        if not self.are_sent or self._unsent:
            return []
        return [one for one in running if one.request.speculate and one.exported_len is None]

    def begin_pass(self, sequences: Collection[Sequence]) -> tuple[int, int]:
        """The bridge for the next pass, 0 for none, and the number of its tensors that have arrived."""
        if self.are_sent:
            return self._bridge, self._num_received
        for sequence in sequences:
            sequence.exported_len = None
        return 0, self._num_received

    def add(self, batch: VerdictBatch, sequences: Mapping[int, Sequence]) -> None:
        """What a pass has sent; what is not wanted any more is marked, but has to be received all the same."""
        export = batch.export
        if export is None or export.bridge != self._bridge:
            return
        self._num_sent += 1
        spans = []
        for request_id, start, count in export.spans:
            sequence = None if request_id is None else sequences.get(request_id)
            if sequence is not None and sequence.exported_len == start:
                sequence.exported_len = start + count
                spans.append((request_id, start, count))
            else:
                spans.append((None, start, count))
        self._unsent.append(replace(export, spans=tuple(spans)))

    def forget(self, sequence: Sequence) -> None:
        """The request ended, was preempted, or is no longer followed."""
        sequence.exported_len = None
        for i, export in enumerate(self._unsent):
            spans = [(None if one == sequence.request_id else one, *place) for one, *place in export.spans]
            self._unsent[i] = replace(export, spans=tuple(spans))

    def flush(self) -> tuple[FeatureExport, ...]:
        """What the drafter is to receive with its next batch."""
        unsent, self._unsent = tuple(self._unsent), []
        self._num_flushed += len(unsent)
        return unsent

    def received(self) -> None:
        """The drafter has answered its last batch."""
        self._num_received = self._num_flushed
