"""`cluster=inprocess`: coordinator and ranks as threads of this process, over loopback TCP. No Ray.

The same loops as everywhere else; for notebooks, debuggers, tests and machines without Ray. Ranks of one role talk
through process groups even as threads, so any layout that fits the machine runs here too. A thread that raises is
replaced like a process that died; one that hangs cannot be ended.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from actors.coordinator.service import CoordinatorService, CoordinatorSpec
from actors.protocol.membership import Death
from actors.transport.channel import Hub
from actors.worker.factory import serve
from actors.worker.logs import LogSpec, close_logs, open_logs
from actors.worker.spec import RankSpec
from cluster.config.schema import LaunchConfig
from cluster.placement.ranks import Devices, RankPlacement, lay_out
from cluster.runtime.delay_proxy import Relay
from cluster.runtime.specs import rank_spec
from parallel.comm.rendezvous import host_store

_LOOPBACK = "127.0.0.1"
_ANY_PORT = f"tcp://{_LOOPBACK}:*"


class InprocessBackend:
    """Threads that live from `start` to `close`. The hub outlives its conductor, and nobody has to connect anew."""

    can_kill = False

    def __init__(self, config: LaunchConfig, log_dir: Path | None = None) -> None:
        self._config = config
        self._logs = log_dir is not None
        if log_dir is not None:
            open_logs("engine", LogSpec(config.cluster.log_level, (str(log_dir),)))
        self._threads: list[threading.Thread] = []
        self._deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._specs: dict[str, RankSpec] = {}
        self._hub: Hub | None = None
        self._relay: Relay | None = None
        self._store = None
        self.places: list[RankPlacement] = []
        self.address = ""

    def place(self, progress: Callable[[str], None]) -> list[RankPlacement]:
        cores = sorted(os.sched_getaffinity(0))[: self._config.cluster.num_cpus]
        return lay_out(self._config, Devices(tuple(cores), torch.cuda.device_count()))

    def start(self, coordinator: CoordinatorSpec, places: list[RankPlacement], eos_token_ids: tuple[int, ...]) -> str:
        self._coordinator = coordinator if self.can_kill else replace(coordinator, silence_s=0.0)
        self._hub = Hub(_ANY_PORT)
        self.places, self.address = places, self._hub.address
        self._store = host_store(_LOOPBACK) if any(place.size > 1 for place in places) else None
        self._conduct(self._coordinator)
        delay_ms = self._config.cluster.link_delay_ms
        self._relay = Relay(self._hub.address, delay_ms / 1e3, _ANY_PORT) if delay_ms else None
        for place in places:
            address = self._relay.address if self._relay and place.role != "target" else self._hub.address
            self._serve(rank_spec(self._config, place, address, _LOOPBACK, eos_token_ids))
        return self._hub.address

    def deaths(self, timeout_s: float) -> list[Death]:
        try:
            return [self._deaths.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def kill(self, identity: str, pid: int | None) -> None:
        assert False, "a thread cannot be ended"

    def replace(self, identity: str, incarnation: int, facts: Mapping[str, object]) -> None:
        if identity == "coordinator":
            self._conduct(replace(self._coordinator, incarnation=incarnation))
        else:
            self._serve(self._specs[identity].successor(incarnation, facts))

    def stranded(self) -> set[str]:
        return set()

    def close(self, *, told: bool) -> None:
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

    def publish(self, file: Path) -> None:
        """Nobody looks at a process but its owner."""

    def _conduct(self, spec: CoordinatorSpec) -> None:
        store = (_LOOPBACK, self._store.port) if self._store is not None else None
        self._launch("coordinator", lambda: CoordinatorService(spec, self._hub, store=store).run())

    def _serve(self, spec: RankSpec) -> None:
        self._specs[spec.identity] = spec
        self._launch(spec.identity, lambda: serve(spec, cancelled=self._closing.is_set))

    def _launch(self, identity: str, work: Callable[[], object]) -> None:
        thread = threading.Thread(target=self._guard, args=(identity, work), name=identity, daemon=True)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def _guard(self, identity: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._deaths.put(Death.by(identity, error))
