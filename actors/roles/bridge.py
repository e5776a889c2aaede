"""The two ends of a bridge: hidden states from the target's lead to the drafter's, as tensors rank to rank.

What a tensor holds is announced with the verdicts and reaches every draft rank with its next batch, so the drafter
receives exactly what was sent, in that order. The target never waits for the drafter: it posts sends, and drops them
when the coordinator says that they were received, or the bridge when it breaks. A drafter that cannot receive what was
announced leaves its epoch. The ends meet in a thread, beside the work of their ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from actors.drafters.interface import FeatureRows
from actors.logs import log_event
from actors.protocol.membership import Bridge
from actors.protocol.messages import FeatureExport, VerdictBatch, VerifyBatch
from actors.roles.after_verdicts import AfterVerdicts
from parallel.comm.group import SINGLE, Group, PeerLost, Sending
from parallel.comm.rendezvous import connect_store, join

if TYPE_CHECKING:
    from actors.roles.target import TargetContext
    from parallel.speculators.fusing import TapFuser

MEETING_S = 20.0
"""Seconds for which the thread of an end waits for the other, which may be in the middle of a long pass."""
TARGET, DRAFTER = 0, 1
"""Ranks of the ends in the bridge's group."""


class BridgeEnd:
    """`group` are the ranks of the role, on `device`; `host` is the address at which the other end reaches this one."""

    def __init__(self, rank: int, host: str, device: str, logger: logging.Logger) -> None:
        self.group: Group = SINGLE
        self._rank = rank
        self._host = host
        self._device = torch.device(device)
        self._logger = logger
        self._lock = threading.Lock()
        self._last_ordered = 0
        self._meeting = 0
        """The bridge that a thread may install; 0: none."""
        self._formed: tuple[int, Group] | None = None
        self._travels_on = torch.device("cpu")

    @property
    def number(self) -> int:
        """The number of the bridge that stands; 0: none."""
        formed = self._formed
        return 0 if formed is None else formed[0]

    def form(self, order: Bridge) -> None:
        """Begin to meet the other end, unless that has begun."""
        if order.number <= self._last_ordered:
            return
        self.close()
        self._last_ordered = self._meeting = order.number
        name = f"bridge-{order.number}"
        threading.Thread(target=self._meet, args=(order,), name=name, daemon=True).start()

    def close(self) -> None:
        """The other end gets an error at once."""
        with self._lock:
            formed, self._formed, self._meeting = self._formed, None, 0
        if formed is not None:
            formed[1].close()

    def interrupt(self) -> None:
        """End transfers that wait for an absent end, from another thread than the one that uses the bridge."""
        formed = self._formed
        if formed is not None:
            formed[1].interrupt()

    def check(self) -> None:
        """PeerLost if what came over the bridge means nothing, because it was interrupted."""

    def _meet(self, order: Bridge) -> None:
        device = self._device if order.by_nccl else torch.device("cpu")
        try:
            store = connect_store(*order.store, timeout_s=MEETING_S / 2)  # it tries twice
            group = join(
                store, "bridge", order.number, self._rank, 2, device, host=self._host or None, meeting_s=MEETING_S
            )
        except PeerLost as error:
            log_event(self._logger, "no-bridge", level=logging.WARNING, number=order.number, why=str(error))
            return
        with self._lock:
            if self._meeting == order.number:
                self._formed, self._travels_on, group = (order.number, group), device, None
        if group is not None:
            group.close()

    def _connected(self, number: int) -> Group:
        formed = self._formed
        if formed is None or formed[0] != number:
            raise PeerLost(f"bridge {number} is closed")
        return formed[1]


class FeatureSender(BridgeEnd, AfterVerdicts):
    """The target's end. What `fuser` makes of the rows is sent, once the verdicts have left."""

    def __init__(self, host: str, device: str, logger: logging.Logger) -> None:
        super().__init__(TARGET, host, device, logger)
        self.fuser: TapFuser | None = None
        self._number = 0  # of the bridge that the rest is of
        self._num_sent = 0
        self._announced: list[Tensor] = []
        self._sendings: deque[tuple[int, Sending]] = deque()
        self._span: tuple[float, float] | None = None

    def wants_features(self, batch: VerifyBatch) -> bool:
        return batch.bridge > 0

    def follow(
        self,
        batch: VerifyBatch,
        answer: VerdictBatch,
        features: Sequence[FeatureRows],
        contexts: Mapping[int, TargetContext],  # noqa: ARG002 (hidden states are of this pass)
    ) -> VerdictBatch:
        span, self._span = self._span, None
        export = self.announce(features, batch.bridge, batch.num_received) if batch.bridge else None
        return replace(answer, export=export, exported=span)

    def answered(self) -> None:
        """The coordinator works on the verdicts meanwhile."""
        self.send()

    def announce(self, features: Sequence[FeatureRows], bridge: int, num_received: int) -> FeatureExport | None:
        """What `send` is about to send over `bridge`; None if that is not the one that stands.

        Tensors up to `num_received` have arrived.
        """
        try:
            self._connected(bridge)
            if bridge != self._number:
                self._number, self._num_sent = bridge, 0
                self._sendings.clear()
            while self._sendings and self._sendings[0][0] <= num_received:
                self._sendings.popleft()[1].wait()
        except PeerLost as error:
            self._lose(error)
            return None
        if not features:
            return None
        self._announced = [one.rows for one in features]
        self._num_sent += 1
        spans = tuple((one.request_id, one.start, len(one.rows)) for one in features)
        size, dtype = features[0].rows.shape[1], features[0].rows.dtype
        if self.fuser is not None:
            size, dtype = self.fuser.shape.outputs, self.fuser.dtype
        return FeatureExport(bridge, self._num_sent, size, str(dtype).removeprefix("torch."), spans)

    def send(self) -> None:
        """Post what was announced; returns before it has left."""
        parts, self._announced = self._announced, []
        if not parts:
            return
        started = time.monotonic()
        try:
            group = self._connected(self._number)
            rows = torch.cat(parts)
            tensor = (rows if self.fuser is None else self.fuser(rows)).to(self._travels_on)
            self._sendings.append((self._num_sent, group.send(tensor, DRAFTER)))
        except PeerLost as error:
            self._lose(error)
        self._span = started, time.monotonic()

    def close(self) -> None:
        super().close()
        self._announced = []
        self._sendings.clear()

    def _lose(self, error: PeerLost) -> None:
        log_event(self._logger, "bridge-lost", level=logging.WARNING, number=self._number, why=str(error))
        self.close()


class FeatureReceiver(BridgeEnd):
    """The drafter's end; its other ranks get the tensors from rank 0."""

    def __init__(self, host: str, device: str, logger: logging.Logger) -> None:
        super().__init__(DRAFTER, host, device, logger)
        self._last = (0, 0)  # bridge and number of the last tensor

    def check(self) -> None:
        formed = self._formed
        if formed is not None:
            formed[1].check()

    def receive(self, exports: Sequence[FeatureExport]) -> list[FeatureRows]:
        """The rows of requests that are still wanted, in order. PeerLost if one cannot be had."""
        found = []
        for export in exports:
            bridge, number = self._last
            if (export.bridge, export.number) != (export.bridge, number + 1 if bridge == export.bridge else 1):
                raise PeerLost(f"tensor {export.number} of bridge {export.bridge} follows {number} of {bridge}")
            self._last = export.bridge, export.number
            rows = self._rows(export)
            parts = rows.split([count for *_, count in export.spans])
            for (request_id, start, _), part in zip(export.spans, parts, strict=True):
                if request_id is not None:
                    found.append(FeatureRows(request_id, start, part))
        return found

    def _rows(self, export: FeatureExport) -> Tensor:
        shape, dtype = (export.num_rows, export.size), getattr(torch, export.dtype)
        if self.group.rank == 0:
            rows = torch.empty(shape, dtype=dtype, device=self._travels_on)
            rows = self._connected(export.bridge).receive(rows, TARGET).to(self._device)
        else:
            rows = torch.empty(shape, dtype=dtype, device=self._device)
        return self.group.broadcast(rows)
