"""`cluster=local`, `existing` and `slurm`: coordinator and ranks as Ray actors, one bundle per device.

Ray carries processes, placement and metrics; rounds never pass through it. `local` starts and ends a Ray of its own on
this machine; the others join the cluster at `cluster.address` and leave it running. This process owns the actors: when
it dies, Ray ends them. Ray restarts none of them, because the supervisor decides when and as what.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayTaskError

from actors.coordinator.spec import CoordinatorSpec
from actors.logs import LogSpec
from actors.protocol.membership import Death
from actors.worker.actor_group import ActorGroup
from actors.worker.ray_actors import SHOW_ALL_GPUS, CoordinatorActor, RankActor, session_logs
from cluster.config.schema import LaunchConfig
from cluster.observability.metrics import make_ray_watch, metric_labels
from cluster.placement.ranks import Devices, NoRoom, RankPlacement, lay_out
from cluster.placement.relocation import relocate
from cluster.runtime.backend import LOOPBACK, Backend
from cluster.runtime.ray_local import LocalRay, dashboard_apart
from cluster.runtime.ray_nodes import await_head, await_layout, check_admitted, free_nodes, living_hosts
from cluster.runtime.ray_reservation import Reservation, on_node

if TYPE_CHECKING:
    from actors.coordinator.stats import Watch

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_worker_niceness": "0",  # Ray's 15 lets anything else on the machine stall a round
    "RAY_metrics_report_interval_ms": "2000",  # Ray's 10 s are long beside a short run
}
"""Values of variables that the user has not set: Ray's own defaults depend on what ran before on this host."""
_SHARED_MEMORY = "/dev/shm"
"""Where Ray keeps its objects."""
_PORT_PATIENCE_S = 10.0
"""How long the port of a dead coordinator may stay taken."""
_RESERVE_S = 5.0
"""Limit for reserving devices that were free a moment ago."""


@contextlib.contextmanager
def _without_log(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _remedy(reason: str) -> str:
    """What may let Ray start on this machine."""
    if "AF_UNIX" in reason:
        remedy = "let RAY_TMPDIR, or TMPDIR, name a folder with a shorter path"
    elif not os.access(_SHARED_MEMORY, os.W_OK):
        remedy = f"make {_SHARED_MEMORY} writable"
    else:
        remedy = "start again when the machine is less busy"
    return f"{remedy}, or use cluster=inprocess"


class RayBackend(Backend):
    """Actors named `coordinator`, `target-0`, `draft-0`, ... in the namespace of the configuration.

    The name of a successor has its incarnation, `draft-0#1`, because Ray keeps that of a dead actor for a while.
    """

    def __init__(
        self, config: LaunchConfig, log_dir: Path | None = None, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(config, progress)
        self._logs = LogSpec(config.cluster.log_level, (str(log_dir.absolute()),) if log_dir is not None else ())
        self._is_local = config.cluster.name == "local"
        self._host = LOOPBACK if self._is_local else ""
        self._watches: list[Callable[[], Watch]] = [partial(make_ray_watch, metric_labels(config))]
        self._actors = ActorGroup()
        self._reservation = Reservation()
        self._owns_ray = False
        self._local_ray: LocalRay | None = None
        self._dashboard: threading.Thread | None = None
        self._closing = threading.Event()
        self._homes: dict[str, RankPlacement] = {}
        self._coordinator_host = ""

    def connect(self) -> None:
        """Start or join Ray, unless this process has done so. Raises ValueError if that fails."""
        if ray.is_initialized():
            return
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        cluster, before = self._config.cluster, signal.getsignal(signal.SIGTERM)
        self._progress("starting Ray" if self._is_local else f"connecting to Ray at {cluster.address}")
        options: dict[str, Any] = {"address": cluster.address}
        if self._is_local:
            self._local_ray = LocalRay()
            num_cpus = cluster.num_cpus or len(os.sched_getaffinity(0))
            options = {"address": "local", "num_cpus": num_cpus, "include_dashboard": cluster.dashboard}
        options |= {"namespace": cluster.namespace, "log_to_driver": False, "logging_level": "ERROR"}
        try:
            with dashboard_apart() as start_dashboard:
                ray.init(**options)
        except SystemExit:  # of Ray's handler, which is that of SIGTERM from the first moment on
            signal.signal(signal.SIGTERM, before)
            signal.raise_signal(signal.SIGTERM)
            raise
        except Exception as error:  # Ray raises bare Exception where its own processes are late
            line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            if self._is_local:
                raise ValueError(f"cluster=local: Ray did not start ({line}); {_remedy(line)}") from error
            raise ValueError(f"cluster.address: Ray cannot be reached or started ({line}); see `ray status`") from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's handler would end the process before its results are written
        self._owns_ray = True
        if self._is_local and cluster.dashboard:
            self._dashboard = threading.Thread(target=self._open_dashboard, args=(start_dashboard,), daemon=True)
            self._dashboard.start()

    def _open_dashboard(self, start: Callable[[], str]) -> None:
        """Starts the dashboard while the ranks load; a dashboard that does not start ends no engine that works.

        Ray's processes are killed with the thread that started them, which therefore lasts until `close`.
        """
        assert self._local_ray is not None
        token = f", its token in {self._local_ray.token_file}" * bool(self._local_ray.token_file)
        try:
            self._progress(f"dashboard\n  http://{start()}{token}")
        except Exception as error:  # Ray raises bare Exception for whatever ended the dashboard
            line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            if not self._closing.is_set():  # Ctrl-C also reaches a dashboard that starts
                self._progress(f"the dashboard did not start ({line})")
        self._closing.wait()

    def reach(self) -> None:
        """Wait for the head of the cluster, if that is another's, and connect."""
        cluster = self._config.cluster
        if not self._is_local and cluster.address.rpartition(":")[2].isdigit():  # not `auto`, or another of Ray's names
            await_head(cluster, self._progress)
            check_admitted(cluster.address)
        self.connect()

    def place(self) -> list[RankPlacement]:
        self.reach()
        if not self._is_local:
            return await_layout(self._config, self._progress)
        resources = ray.cluster_resources()
        cores = sorted(os.sched_getaffinity(0))[: int(resources.get("CPU", 0))]
        return lay_out(self._config, Devices(tuple(cores), int(resources.get("GPU", 0))))

    def start(self, coordinator: CoordinatorSpec, places: list[RankPlacement]) -> None:
        self._coordinator = coordinator
        self._homes = {place.identity: place for place in places}
        self._placements = dict(self._homes)
        self._admit(places)
        cluster = self._config.cluster
        actor = self._create_coordinator(0)
        host = self._hub_host(LOOPBACK) if self._is_alone else self._host
        options = self.keys, self._needs_store, cluster.interface
        bound = actor.bind.remote(host, (0, cluster.port), *options, is_alone=self._is_alone)
        self._reservation.reserve(places, cluster.startup_timeout_s, self._progress)
        for place in places:
            self._create_rank(place.identity, 0)
        try:
            self.address, self.client_address = ray.get(bound, timeout=cluster.startup_timeout_s)
        except RayTaskError as error:
            field = "" if "cluster.interface" in str(error.cause) else f"cluster.port={cluster.port}: "
            raise ValueError(f"{field}{error.cause}") from error
        self._actors.run("coordinator", coordinator, self._watches, bound)
        self._open_relay()
        for place in places:
            spec = self._specify(place, self._host, coordinator.eos_token_ids)
            self._actors.run(place.identity, spec, cluster.interface)

    def deaths(self, timeout_s: float) -> list[Death]:
        return self._actors.deaths(timeout_s)

    def kill(self, identity: str, pid: int | None) -> None:
        if self._is_local and pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        else:
            self._actors.kill(identity)  # Ray kills a process that does not react after five seconds

    def replace(self, identity: str, incarnation: int, facts: Mapping[str, object]) -> None:
        if not self._is_local:
            self._leave_lost_node(identity)
        if identity == "coordinator":
            self._replace_coordinator(incarnation)
            return
        place, spec = self._placements[identity], self._specs[identity].successor(incarnation, facts)
        address = self.hub_address(place.role)
        spec = replace(spec, hub_address=address, device=place.device, num_threads=place.num_threads)
        self._create_rank(identity, incarnation)
        self._actors.run(identity, spec, self._config.cluster.interface)

    def stranded(self) -> set[str]:
        if self._is_local:
            return set()
        hosts = living_hosts()
        lost = {place.identity for place in self.places if place.host not in hosts}
        return lost if self._coordinator_host in hosts else lost | {"coordinator"}

    def publish(self, file: Path) -> None:
        if not self._is_local:  # a local Ray and its dashboard end with the run
            folder = session_logs()
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder)

    def close(self, *, graceful: bool = False) -> None:
        if self._dashboard is not None:
            self._closing.set()
            with _without_log("ray._private.services"):  # of a dashboard that ends before it has started
                self._dashboard.join()
        if ray.is_initialized():
            self._actors.close(graceful=graceful)
            if self._relay is not None:
                self._relay.close()
            if self._owns_ray:
                ray.shutdown()  # also returns what is reserved; a request to a Ray that is gone blocks for a minute
            else:
                self._reservation.release()
        if self._local_ray is not None:
            self._local_ray.close()
            self._local_ray = None

    @property
    def _is_alone(self) -> bool:
        """Whether all processes are on this machine, of which no address is asked for."""
        return self._is_local or (self._coordinator_host == LOOPBACK and not self._config.cluster.interface)

    def _create_coordinator(self, incarnation: int) -> Any:
        """Start it on the node of the target's lead, where two of a round's four records stay, as every successor."""
        title = f"coordinator: pipeline={self._config.pipeline.name}"
        lead = self.places[0]
        self._coordinator_host = lead.host
        return self._create("coordinator", incarnation, CoordinatorActor, title, self._logs, resources=on_node(lead))

    def _replace_coordinator(self, incarnation: int) -> None:
        """Start the successor at the same addresses, unless its node, which is that of the target's lead, is gone."""
        cluster, seat = self._config.cluster, self._coordinator_host
        actor = self._create_coordinator(incarnation)
        if self._coordinator_host == seat:
            ports = tuple([int(address.rpartition(":")[2]) for address in (self.address, self.client_address)])
            host = self.address.removeprefix("tcp://").rpartition(":")[0]
            options = self.keys, self._needs_store, cluster.interface, _PORT_PATIENCE_S
            bound = actor.bind.remote(host, ports, *options, is_alone=self._is_alone)
        else:
            bound = actor.bind.remote(self._host, (0, cluster.port), self.keys, self._needs_store, cluster.interface)
            self.address, self.client_address = ray.get(bound, timeout=cluster.startup_timeout_s)
        successor = replace(self._coordinator, incarnation=incarnation, weights=self.weights)
        self._actors.run("coordinator", successor, self._watches, bound)

    def _leave_lost_node(self, identity: str) -> None:
        """If the node of this rank is gone, reserve devices elsewhere; raises NoRoom while there are none."""
        place = self.places[0] if identity == "coordinator" else self._placements[identity]
        moved = relocate(self._config, self._placements, self._homes, free_nodes(), place.role)
        try:
            self._reservation.reserve(list(moved.values()), _RESERVE_S, separately=True)
        except ValueError as error:
            raise NoRoom(f"{place.identity}: node {place.host} is gone; {error}") from error
        for mover in moved:
            self._reservation.give_back(self._placements[mover])
        self._placements |= moved

    def _create_rank(self, identity: str, incarnation: int) -> None:
        place = self._placements[identity]
        arguments = (identity, self.title(place), self._logs, place.share)
        options = self._reservation.options(place)
        if place.kind == "cuda":
            options["runtime_env"] = {"env_vars": SHOW_ALL_GPUS}
        self._create(identity, incarnation, RankActor, *arguments, **options)

    def _create(self, identity: str, incarnation: int, actor_class: Any, *arguments: object, **options: object) -> Any:
        namespace = self._config.cluster.namespace
        name = f"{identity}#{incarnation}" if incarnation else identity
        try:
            return self._actors.create(identity, name, actor_class, *arguments, namespace=namespace, **options)
        except ValueError as error:
            raise ValueError(
                f"cluster.namespace={namespace}: another engine's {identity} runs there; close it or take another "
                "namespace"
            ) from error

    def title(self, place: RankPlacement) -> str:
        """The rank's name on the dashboard."""
        work = "verifies" if place.role == "target" else f"proposes, drafter={self._config.drafter.name}"
        part = f", one of {place.size} ranks" if place.size > 1 else ""
        return f"{place.identity}: {work}{part}, {place.device}"
