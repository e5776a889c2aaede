"""`cluster=inprocess`: coordinator and ranks as threads of this process, over inproc:// sockets. No Ray.

The same loops as everywhere else; for notebooks, debuggers, tests and machines without Ray. Ranks of one role talk
through process groups even as threads, so any layout that fits the machine runs here too.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from actors.conductor import Conductor, CoordinatorSpec
from actors.levels import is_spared
from actors.lifecycle import Failure
from actors.logs import LogSpec, close_logs, open_logs
from actors.roles import RankSpec, serve
from actors.wire import Hub
from cluster.config import LaunchConfig
from cluster.placement import Devices, RankPlacement, lay_out
from parallel.rendezvous import host_store

_LOOPBACK = "127.0.0.1"
_engines = itertools.count()


class InprocessBackend:
    """Threads that live from `start` to `close`."""

    def __init__(self, config: LaunchConfig, log_dir: Path | None = None) -> None:
        self._config = config
        self._logs = log_dir is not None
        if log_dir is not None:
            open_logs("engine", LogSpec(config.cluster.log_level, (str(log_dir),)))
        self._threads: list[threading.Thread] = []
        self._died: str | None = None
        self._store = None

    def place(self, progress: Callable[[str], None]) -> list[RankPlacement]:
        cores = sorted(os.sched_getaffinity(0))[: self._config.cluster.num_cpus]
        return lay_out(self._config, Devices(tuple(cores), torch.cuda.device_count()))

    def start(self, coordinator: CoordinatorSpec, places: list[RankPlacement], eos_token_ids: tuple[int, ...]) -> str:
        hub = Hub(f"inproc://engine-{os.getpid()}-{next(_engines)}")
        self._store = host_store(_LOOPBACK) if any(place.size > 1 for place in places) else None
        self._launch("coordinator", lambda: self._conduct(coordinator, hub))
        for place in places:
            spec = rank_spec(self._config, place, hub.address, self._store_address(), _LOOPBACK, eos_token_ids)
            self._launch(place.identity, lambda spec=spec: serve(spec))
        return hub.address

    def death(self) -> str | None:
        return self._died

    def close(self) -> None:
        for thread in self._threads:
            thread.join(timeout=10)
        self._store = None
        if self._logs:
            close_logs()

    def publish(self, file: Path) -> None:
        """Nobody looks at a process but its owner."""

    def _conduct(self, spec: CoordinatorSpec, hub: Hub) -> None:
        try:
            Conductor(spec, hub).run()
        finally:
            hub.close()

    def _store_address(self) -> tuple[str, int] | None:
        return (_LOOPBACK, self._store.port) if self._store is not None else None

    def _launch(self, name: str, work) -> None:
        thread = threading.Thread(target=self._guard, args=(name, work), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard(self, name: str, work) -> None:
        try:
            work()
        except Exception as error:
            if not is_spared(name):
                self._died = f"{name}: {Failure.of(name, 0, error).text}"


def rank_spec(
    config: LaunchConfig,
    place: RankPlacement,
    hub_address: str,
    store: tuple[str, int] | None,
    host: str,
    eos_token_ids: tuple[int, ...],
) -> RankSpec:
    """A rank's orders from its place and the user's options."""
    return RankSpec(
        role=place.role,
        rank=place.rank,
        size=place.size,
        epoch=0,
        device=place.device,
        num_threads=place.num_threads,
        cores=place.cores,
        hub_address=hub_address,
        store=store,
        host=host,
        eos_token_ids=eos_token_ids,
        target=config.target,
        drafter=config.drafter,
        verify=config.verify,
        pipeline=str(config.pipeline.name),
        scheduler=config.scheduler,
    )
