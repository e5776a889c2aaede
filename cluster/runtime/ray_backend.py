"""`cluster=local`, `existing` and `slurm`: coordinator and ranks as Ray actors, one bundle per device.

Ray carries processes, placement and metrics; rounds never pass through it. `local` starts a Ray of its own on this
machine and ends it; the others join the cluster at `cluster.address` and leave it running. Actors are owned by this
process: when it dies, Ray ends them. None is restarted by Ray, which knows neither when nor as what.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayTaskError

from actors.coordinator.service import CoordinatorSpec, Watch
from actors.protocol.membership import Death
from actors.worker.actor_group import ActorGroup
from actors.worker.logs import LogSpec
from actors.worker.ray_actors import CoordinatorActor, RankActor, session_logs
from actors.worker.spec import RankSpec
from cluster.config.schema import LaunchConfig
from cluster.observability.metrics import make_ray_watch, metric_labels
from cluster.placement.ranks import Devices, RankPlacement, lay_out
from cluster.placement.relocation import NoRoom, relocate
from cluster.runtime.delay_proxy import Relay
from cluster.runtime.ray_nodes import await_head, await_layout, free_nodes, living_hosts
from cluster.runtime.ray_reservation import Reservation, on_node
from cluster.runtime.specs import rank_spec

_LOOPBACK = "127.0.0.1"
_PORT_PATIENCE_S = 10.0
_RESERVE_S = 5.0
"""To get devices that were free a moment ago."""


class RayBackend:
    """Actors named `coordinator`, `target-0`, `draft-0`, ... in the namespace of the configuration.

    The name of a successor tells its incarnation, `draft-0#1`: Ray keeps that of a dead actor for a while.
    """

    can_kill = True

    def __init__(self, config: LaunchConfig, log_dir: Path | None = None) -> None:
        self._config = config
        self._logs = LogSpec(config.cluster.log_level, (str(log_dir.absolute()),) if log_dir is not None else ())
        self._is_local = config.cluster.name == "local"
        self._host = _LOOPBACK if self._is_local else ""
        self._actors = ActorGroup()
        self._reservation = Reservation()
        self._owns_ray = False
        self._relay: Relay | None = None
        self._specs: dict[str, RankSpec] = {}
        self._homes: dict[str, RankPlacement] = {}
        self._places: dict[str, RankPlacement] = {}
        self._seat = ""  # node of the coordinator
        self.address = ""

    @property
    def places(self) -> list[RankPlacement]:
        return list(self._places.values())

    def connect(self) -> None:
        """Start or join Ray."""
        if not ray.is_initialized():
            self._init()
            self._owns_ray = True

    def place(self, progress: Callable[[str], None]) -> list[RankPlacement]:
        self._progress = progress
        if not self._is_local:
            await_head(self._config.cluster.address, self._config.cluster.wait_s, progress)
        self.connect()
        if not self._is_local:
            return await_layout(self._config, progress)
        resources = ray.cluster_resources()
        cores = sorted(os.sched_getaffinity(0))[: int(resources.get("CPU", 0))]
        return lay_out(self._config, Devices(tuple(cores), int(resources.get("GPU", 0))))

    def start(self, coordinator: CoordinatorSpec, places: list[RankPlacement], eos_token_ids: tuple[int, ...]) -> str:
        self._coordinator = coordinator
        self._homes = {place.identity: place for place in places}
        self._places = dict(self._homes)
        cluster = self._config.cluster
        conductor = self._create_conductor(0)
        bound = conductor.bind.remote(self._host, cluster.port, self._needs_store, cluster.interface)
        self._reservation.take(places, cluster.startup_timeout_s, self._progress)
        for place in places:
            self._create_rank(place.identity, 0)
        try:
            self.address = ray.get(bound, timeout=cluster.startup_timeout_s)
        except RayTaskError as error:
            field = "" if "cluster.interface" in str(error.cause) else f"cluster.port={cluster.port}: "
            raise ValueError(f"{field}{error.cause}") from error
        self._actors.run("coordinator", coordinator, self._watches)
        if cluster.link_delay_ms:
            self._relay = Relay(self.address, cluster.link_delay_ms / 1e3, f"tcp://{_LOOPBACK}:*")
        for place in places:
            address = self._relay.address if self._relay and place.role != "target" else self.address
            spec = rank_spec(self._config, place, address, self._host, eos_token_ids)
            self._specs[place.identity] = spec
            self._actors.run(place.identity, spec, cluster.interface)
        return self.address

    def deaths(self, timeout_s: float) -> list[Death]:
        return self._actors.deaths(timeout_s)

    def kill(self, identity: str, pid: int | None) -> None:
        if self._is_local and pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        else:
            self._actors.kill(identity)  # Ray asks first: a frozen process is ended after five seconds

    def replace(self, identity: str, incarnation: int, facts: Mapping[str, object]) -> None:
        if not self._is_local:
            self._leave_lost_node(identity)
        if identity == "coordinator":
            self._replace_conductor(incarnation)
            return
        place, spec = self._places[identity], self._specs[identity].successor(incarnation, facts)
        address = spec.hub_address if self._relay is not None else self.address
        spec = replace(spec, hub_address=address, device=place.device, num_threads=place.num_threads)
        self._create_rank(identity, incarnation)
        self._actors.run(identity, spec, self._config.cluster.interface)

    def stranded(self) -> set[str]:
        if self._is_local:
            return set()
        hosts = living_hosts()
        lost = {place.identity for place in self.places if place.host not in hosts}
        return lost if self._seat in hosts else lost | {"coordinator"}

    def publish(self, file: Path) -> None:
        if not self._is_local:  # that Ray, and its dashboard, end with the run
            folder = session_logs()
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder)

    def close(self, *, told: bool) -> None:
        if not ray.is_initialized():
            return
        self._actors.close(told=told)
        if self._relay is not None:
            self._relay.close()
        if self._owns_ray:
            ray.shutdown()  # also gives back what was reserved; asked singly, a Ray that is gone is waited for a minute
        else:
            self._reservation.release()

    def _init(self) -> None:
        # Ray's defaults depend on what ran before on this host; say what is wanted.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets anything else on the machine stall a round
        os.environ.setdefault("RAY_metrics_report_interval_ms", "2000")  # Ray's 10 s are long beside a short run
        before = signal.getsignal(signal.SIGTERM)
        self._connect()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's handler lets nobody write down what there is

    def _connect(self) -> None:
        cluster = self._config.cluster
        common = {"namespace": cluster.namespace, "log_to_driver": False, "logging_level": "ERROR"}
        try:
            if self._is_local:
                ray.init(
                    address="local",
                    num_cpus=cluster.num_cpus or len(os.sched_getaffinity(0)),
                    include_dashboard=cluster.dashboard,
                    **common,
                )
            else:
                ray.init(address=cluster.address, **common)
        except (ConnectionError, RuntimeError, ValueError) as error:
            line = str(error).strip().splitlines()[0]
            raise ValueError(f"cluster.address: Ray cannot be reached or started ({line}); see `ray status`") from error

    @property
    def _needs_store(self) -> bool:
        return any(place.size > 1 for place in self._places.values())

    @property
    def _watches(self) -> list[Callable[[], Watch]]:
        return [partial(make_ray_watch, metric_labels(self._config))]

    def _create_conductor(self, incarnation: int) -> object:
        """Beside the target's lead: two of a round's four records then stay on its node. So does every successor:
        ranks and clients know one address."""
        title = f"coordinator: pipeline={self._config.pipeline.name}"
        lead = self.places[0]
        self._seat = lead.host
        return self._create("coordinator", incarnation, CoordinatorActor, title, self._logs, resources=on_node(lead))

    def _replace_conductor(self, incarnation: int) -> None:
        """At the same address; at another only where its node is gone, and with it the target's lead."""
        cluster, seat = self._config.cluster, self._seat
        conductor = self._create_conductor(incarnation)
        if self._seat == seat:
            host, _, port = self.address.removeprefix("tcp://").rpartition(":")
            conductor.bind.remote(host, int(port), self._needs_store, cluster.interface, _PORT_PATIENCE_S)
        else:
            bound = conductor.bind.remote(self._host, cluster.port, self._needs_store, cluster.interface)
            self.address = ray.get(bound, timeout=cluster.startup_timeout_s)
        self._actors.run("coordinator", replace(self._coordinator, incarnation=incarnation), self._watches)

    def _leave_lost_node(self, identity: str) -> None:
        """If this part's node is gone, take room for its role elsewhere; NoRoom while there is none."""
        place = self.places[0] if identity == "coordinator" else self._places[identity]
        moved = relocate(self._config, self._places, self._homes, free_nodes(), place.role)
        try:
            self._reservation.take(list(moved.values()), _RESERVE_S, apart=True)
        except ValueError as error:
            raise NoRoom(f"{place.identity}: node {place.host} is gone; {error}") from error
        for mover in moved:
            self._reservation.give_back(self._places[mover])
        self._places |= moved

    def _create_rank(self, identity: str, incarnation: int) -> None:
        place = self._places[identity]
        arguments = (identity, self.title(place), self._logs, place.share)
        self._create(identity, incarnation, RankActor, *arguments, **self._reservation.options(place))

    def _create(
        self, identity: str, incarnation: int, actor_class: object, *arguments: object, **options: object
    ) -> object:
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
        """What the dashboard calls a rank."""
        work = "verifies" if place.role == "target" else f"proposes, drafter={self._config.drafter.name}"
        part = f", one of {place.size} ranks" if place.size > 1 else ""
        return f"{place.identity}: {work}{part}, {place.device}"
