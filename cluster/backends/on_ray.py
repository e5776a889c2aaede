"""`cluster=local` and `cluster=existing`: coordinator and ranks as Ray actors, one bundle of devices per rank.

Ray carries processes, placement and metrics; rounds never pass through it. `local` starts a Ray of its own on this
machine and ends it; `existing` joins the cluster at `cluster.address` and leaves it running.
"""

from __future__ import annotations

import os

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.conductor import CoordinatorSpec
from actors.group import ActorGroup
from actors.worker import CoordinatorActor, RankActor
from cluster.backends.inprocess import rank_spec
from cluster.config import LaunchConfig
from cluster.metrics import make_ray_watch
from cluster.placement import Devices, RankPlacement

_LOOPBACK = "127.0.0.1"


class RayBackend:
    """Actors named `coordinator`, `target-0`, `draft-0`, ... in the namespace of the configuration."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._is_local = config.cluster.name == "local"
        self._host = _LOOPBACK if self._is_local else ""
        self._actors = ActorGroup()
        self._bundles: PlacementGroup | None = None
        self._owns_ray = False

    def devices(self) -> Devices:
        """Start or join Ray, and count."""
        if not ray.is_initialized():
            self._init()
            self._owns_ray = True
        resources = ray.cluster_resources()
        cores = sorted(os.sched_getaffinity(0)) if self._is_local else range(int(resources.get("CPU", 0)))
        return Devices(tuple(cores), int(resources.get("GPU", 0)))

    def start(self, coordinator: CoordinatorSpec, places: list[RankPlacement], eos_token_ids: tuple[int, ...]) -> str:
        conductor = self._actors.create("coordinator", CoordinatorActor)
        bound = conductor.bind.remote(self._host, any(place.size > 1 for place in places))
        self._reserve(places)
        for place in places:
            self._actors.create(place.identity, RankActor, place.identity, **self._options(place, places))
        hub_address, store = ray.get(bound, timeout=self._config.cluster.startup_timeout_s)
        self._actors.run("coordinator", coordinator, make_ray_watch)
        for place in places:
            spec = rank_spec(self._config, place, hub_address, store, self._host, eos_token_ids)
            self._actors.run(place.identity, spec)
        return hub_address

    def death(self) -> str | None:
        return self._actors.death()

    def close(self) -> None:
        if not ray.is_initialized():
            return
        self._actors.close()
        if self._bundles is not None:
            remove_placement_group(self._bundles)
            self._bundles = None
        if self._owns_ray:
            ray.shutdown()

    def _init(self) -> None:
        # Ray's defaults depend on what ran before on this host; say what is wanted.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
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

    def _reserve(self, places: list[RankPlacement]) -> None:
        """One bundle per rank that has a device; all of them or none."""
        bundles = [_resources(place) for place in places if place.share]
        self._bundles = placement_group(bundles, strategy="PACK", name="engine")
        if not self._bundles.wait(self._config.cluster.startup_timeout_s):
            raise ValueError(
                f"cluster: {bundles} asked, {ray.available_resources()} free; end other jobs or ask for fewer ranks"
            )

    def _options(self, place: RankPlacement, places: list[RankPlacement]) -> dict[str, object]:
        resources = _resources(place)
        options: dict[str, object] = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
        if place.share:
            bundle = [other.identity for other in places if other.share].index(place.identity)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._bundles, placement_group_bundle_index=bundle
            )
        return options


def _resources(place: RankPlacement) -> dict[str, float]:
    if not place.share:
        return {}
    if place.device.startswith("cuda"):
        return {"GPU": place.share, "CPU": 0.01}
    return {"CPU": place.share * max(1, len(place.cores))}
