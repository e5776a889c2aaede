"""`cluster=inprocess`: coordinator and ranks as threads of this process, which hand each other their records. No Ray.

For notebooks, debuggers, tests and machines without Ray; the loops are those of every other backend. Ranks of one role
use process groups even as threads, so any layout that fits the machine runs here too. A thread that raises is replaced
like a process that died; a thread that hangs cannot be ended.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from actors.coordinator.service import CoordinatorService
from actors.coordinator.spec import CoordinatorSpec
from actors.logs import LogSpec, close_logs, open_logs
from actors.protocol.membership import Death
from actors.transport.channel import Hub
from actors.worker.factory import serve
from actors.worker.spec import RankSpec
from cluster.config.schema import LaunchConfig
from cluster.placement.ranks import Devices, RankPlacement, lay_out
from cluster.runtime.backend import LOOPBACK, Backend

if TYPE_CHECKING:
    from parallel.comm.rendezvous import HostedStore


class InprocessBackend(Backend):
    """Threads that live from `start` to `close`. The hub outlives a coordinator that fails, with all connections."""

    can_kill = False

    def __init__(
        self, config: LaunchConfig, log_dir: Path | None = None, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(config, progress)
        self._logs = log_dir is not None
        if log_dir is not None:
            open_logs("engine", LogSpec(config.cluster.log_level, (str(log_dir),)))
        self._threads: list[threading.Thread] = []
        self._deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._hub: Hub | None = None
        self._store: HostedStore | None = None

    def place(self) -> list[RankPlacement]:
        cores = sorted(os.sched_getaffinity(0))[: self._config.cluster.num_cpus]
        return lay_out(self._config, Devices(tuple(cores), torch.cuda.device_count()))

    def start(self, coordinator: CoordinatorSpec, places: list[RankPlacement]) -> None:
        self._coordinator = coordinator if self.can_kill else replace(coordinator, silence_s=0.0)
        self._placements = {place.identity: place for place in places}
        self._admit(places)
        self._hub = Hub(f"tcp://{self._hub_host(LOOPBACK)}:*", self.keys, near=True)
        self.address, self.client_address = self._hub.address, self._hub.client_address
        self._store = _open_store() if self._needs_store else None
        self._start_coordinator(self._coordinator)
        self._open_relay()
        for place in places:
            self._start_rank(self._specify(place, LOOPBACK, coordinator.eos_token_ids))

    def deaths(self, timeout_s: float) -> list[Death]:
        try:
            return [self._deaths.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def kill(self, identity: str, pid: int | None) -> None:
        raise AssertionError(f"{identity} ({pid}): a thread cannot be ended")

    def replace(self, identity: str, incarnation: int, facts: Mapping[str, object]) -> None:
        if identity == "coordinator":
            self._start_coordinator(replace(self._coordinator, incarnation=incarnation, weights=self.weights))
        else:
            spec = self._specs[identity] = self._specs[identity].successor(incarnation, facts)
            self._start_rank(spec)

    def close(self, *, graceful: bool = False) -> None:  # noqa: ARG002 (threads can only leave by themselves)
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=10)
        if self._relay is not None:
            self._relay.close()
        if self._hub is not None:
            self._hub.close()
        self._store = None
        if self._logs:
            close_logs()

    def _start_coordinator(self, spec: CoordinatorSpec) -> None:
        assert self._hub is not None
        hub, store = self._hub, self._store and self._store.place
        self._start_thread("coordinator", lambda: CoordinatorService(spec, hub, store=store).run())

    def _start_rank(self, spec: RankSpec) -> None:
        self._start_thread(spec.identity, lambda: serve(spec, cancelled=self._closing.is_set))

    def _start_thread(self, identity: str, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                self._deaths.put(Death.by(identity, error))
            else:
                self._deaths.put(Death(identity, "ended"))

        thread = threading.Thread(target=run, name=identity, daemon=True)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()


def _open_store() -> HostedStore:
    from parallel.comm.rendezvous import store_in_memory  # for roles of several ranks, and bridges, alone

    return store_in_memory()
