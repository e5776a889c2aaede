"""The records of the control line in bytes, and what becomes of bytes that are none."""

from __future__ import annotations

import logging
import time

from actors.logs import log_event, logger_of
from actors.protocol import membership, messages
from actors.transport.codec import Codec

_REQUESTS = (messages.Request, messages.Abort, messages.Outputs, messages.ReportOrder, messages.Report)
_DRAFTS = (messages.DraftBatch, messages.ProposalBatch, messages.DraftPreviewBatch)
_VERDICTS = (messages.VerifyBatch, messages.VerdictBatch)
_PROCESSES = (membership.Alive, membership.RankLost, membership.Silent, membership.Hello, membership.Stop)
_FAILURES = (membership.PassFailed,)
_EPOCHS = (membership.Recall, membership.Join, membership.Ready, membership.RoleLost, membership.RoleBack)
_BRIDGES = (membership.Bridge,)
_KEYS = (membership.ClientKeys,)
_WEIGHTS = (messages.UpdateWeights, messages.WeightsUpdated)
_LEASES = tuple(f"actors.protocol.leases:{name}" for name in ("LeaseOrder", "LeaseQuery", "LeaseAnswer"))
CODEC = Codec(
    _REQUESTS + _DRAFTS + _VERDICTS + _PROCESSES + _EPOCHS + _BRIDGES + _FAILURES + _KEYS + _WEIGHTS,
    _LEASES,
)
LONGEST_TO_HUB = 1 << 24
"""Bytes of a record. Proposals with distributions for a large batch have about a third of it."""
LONGEST_TO_LINK = 1 << 28
"""A report with as many spans as are kept has a few millions."""
MOST_QUEUED = 20_000
"""Records that wait for a peer that does not read; further ones are lost, as for a peer that is gone."""
LINGER_MS = 200
"""How long `close` may still deliver: enough for a last record, too short to delay an exit."""
RECONNECT_MS = 20
"""Time between two attempts of a link to reach a hub that is gone: its successor listens at the same address."""
_WARN_EVERY_S = 5.0


class Reader:
    """An end of a connection, which counts what it could not read."""

    def __init__(self) -> None:
        self.num_unreadable = 0
        self._warned_at = -_WARN_EVERY_S

    def refuse(self, sender: str, error: Exception) -> None:
        """Count a record that was dropped, and log it unless one was logged just now."""
        self.num_unreadable += 1
        if time.monotonic() - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = time.monotonic()
            facts = {"sender": sender, "so_far": self.num_unreadable, "why": str(error)}
            log_event(logger_of("transport"), "refused", level=logging.WARNING, **facts)
