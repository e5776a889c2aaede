"""`job=pool` with a Ray: the pool's process is the actor `pool`, a group of its own in the dashboard.

Its namespace is `cluster.namespace` with `-pool` behind it, so that engines and pools of one Ray stand apart. The actor
runs on the node where the job was started, whose files hold the pool's secret and the keys of its engines, and ends
with this process. Leases and drafts do not pass through Ray.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.logs import LogSpec
from actors.worker import openmp
from actors.worker.actor_group import ActorGroup
from actors.worker.ray_actors import open_actor_logs
from cluster.config.schema import LaunchConfig
from cluster.placement.ranks import Devices, RankPlacement, place_alone
from cluster.runtime.ray_backend import RayBackend
from cluster.runtime.ray_nodes import free_here

if TYPE_CHECKING:
    from cluster.draft_pool import DraftPool

NAME = "pool"
_POLL_S = 0.25


class PoolWorker:
    """The process of a draft pool. The dashboard shows `title`."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._pool: DraftPool | None = None
        self._cancelled = threading.Event()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __repr__(self) -> str:
        return self._title

    def open(self, config: LaunchConfig, run_dir: Path) -> tuple[str, Path]:
        """Load the drafter and listen; returns the address and the file with the key of engines."""
        open_actor_logs(NAME, LogSpec(config.cluster.log_level, (str(run_dir / "logs"),)))
        openmp.configure_threads(shared=False)
        from cluster.draft_pool import open_alone  # loads PyTorch, which reads these settings

        self._pool = open_alone(config, run_dir, self._lines.put)
        return self._pool.address, self._pool.key_file

    def run(self) -> None:
        """Serve until `end`."""
        assert self._pool is not None, "open() is called first"
        with self._pool:
            self._pool.serve(self._cancelled.is_set)

    @ray.method(concurrency_group="ctl")
    def status(self) -> str:
        return f"{NAME} pid={os.getpid()}"

    @ray.method(concurrency_group="ctl")
    def lines(self) -> list[str]:
        """What there is to say since the last call."""
        return [self._lines.get() for _ in range(self._lines.qsize())]

    @ray.method(concurrency_group="ctl")
    def end(self) -> None:
        self._cancelled.set()


_OPTIONS: dict[str, Any] = {"concurrency_groups": {"ctl": 1}, "max_restarts": 0}
PoolActor = ray.remote(**_OPTIONS)(PoolWorker)


class PoolOnRay:
    """A draft pool in an actor of its own: the same methods as `DraftPool`, and the same errors."""

    def __init__(
        self,
        config: LaunchConfig,
        run_dir: Path,
        observe: Callable[[str], None] = lambda _: None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        cluster = replace(config.cluster, namespace=f"{config.cluster.namespace}-pool")
        self._observe = observe
        self._actors = ActorGroup()
        with ExitStack() as opened:
            backend = RayBackend(replace(config, cluster=cluster), progress=progress)
            opened.callback(backend.close)
            backend.reach()
            opened.callback(self._actors.close, graceful=False)
            free = free_here()
            place = place_alone(config, Devices(free.cores[: cluster.num_cpus], free.num_gpus))
            progress("loading the drafter")
            self._actor = self._create(place, cluster.namespace, f"lends drafter={config.drafter.name}")
            if place.kind == "cpu":
                cluster = replace(cluster, num_cpus=place.num_threads)
            opening = self._actor.open.remote(replace(config, cluster=cluster), run_dir.absolute())
            try:
                self.address, self.key_file = ray.get(opening, timeout=cluster.startup_timeout_s)
            except RayTaskError as error:
                raise (ValueError if isinstance(error.cause, ValueError) else RuntimeError)(str(error.cause)) from error
            except GetTimeoutError as error:
                line = (
                    f"cluster.startup_timeout_s={cluster.startup_timeout_s:g}: the pool was not ready by then; raise it"
                )
                raise ValueError(line) from error
            self._actors.run(NAME)
            self._opened = opened.pop_all()

    def _create(self, place: RankPlacement, namespace: str, work: str) -> Any:
        is_gpu = place.kind == "cuda"
        options: dict[str, Any] = {"num_cpus": 0 if is_gpu else place.num_threads, "num_gpus": int(is_gpu)}
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options |= {"namespace": namespace, "scheduling_strategy": here}
        try:
            return self._actors.create(NAME, NAME, PoolActor, f"{NAME}: {work}, {place.device}", **options)
        except ValueError as error:
            line = f"cluster.namespace={namespace}: another pool runs there; close it or take another namespace"
            raise ValueError(line) from error

    def serve(self, cancelled: Callable[[], bool]) -> None:
        """Serves leases until `cancelled()`, which is called a few times a second. RuntimeError if the process dies."""
        while not cancelled():
            if deaths := self._actors.deaths(_POLL_S):
                raise RuntimeError(f"the pool's process ended: {deaths[0].text}")
            try:
                lines = ray.get(self._actor.lines.remote())
            except RayError:
                continue  # its death is reported next
            for line in lines:
                self._observe(line)
        with suppress(RayError):
            ray.get(self._actor.end.remote())
        self._actors.close(graceful=True)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
