"""Devices of a Ray cluster that an engine holds: placement groups with one bundle per device.

The devices of the start are one group, reserved together or not at all. Devices that are reserved later, because a node
was lost, have a group each, so that each can be returned when its node is lost too. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement.ranks import RankPlacement

Device = tuple[str, str | tuple[int, ...]]
"""The node ("" for this machine), and a GPU's name or the cores of a CPU rank."""

_PROGRESS_S = 5.0
_ON_NODE = 0.001
"""Share of the resource `node:ADDRESS`, of which every node has 1, that ties a bundle or an actor to the node."""


class Reservation:
    """What is reserved from the first `reserve` to `release`."""

    def __init__(self) -> None:
        self._groups: list[PlacementGroup] = []
        self._bundle_of: dict[Device, tuple[PlacementGroup, int]] = {}

    def reserve(
        self,
        places: Sequence[RankPlacement],
        timeout_s: float,
        progress: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        separately: bool = False,
    ) -> None:
        """Hold all devices of these places, those `separately` reserved in a group each.

        Raises ValueError after `timeout_s`. Reports to `progress` what it waits for. Whatever is raised, none of the
        new ones is held.
        """
        shares = {device: bundle for device, bundle in device_bundles(places).items() if device not in self._bundle_of}
        parts = [[device] for device in shares] if separately else [list(shares)] * bool(shares)
        groups = [placement_group([shares[device] for device in part], strategy="PACK") for part in parts]
        missing = f"{_describe(shares)} asked, of which not all is free; end other jobs or ask for fewer ranks"
        started, waiting = clock(), list(groups)
        try:
            while waiting:
                left_s = started + timeout_s - clock()
                if waiting[0].wait(max(0.0, min(_PROGRESS_S, left_s))):
                    del waiting[0]
                elif left_s <= _PROGRESS_S:
                    raise ValueError(f"cluster: {missing}")
                else:
                    progress(f"waiting for {clock() - started:.0f} s: {missing}")
        except BaseException:  # Ctrl-C, in a notebook whose Ray goes on
            for group in groups:
                remove_placement_group(group)
            raise
        self._groups += groups
        for group, part in zip(groups, parts, strict=True):
            self._bundle_of |= {device: (group, index) for index, device in enumerate(part)}

    def give_back(self, place: RankPlacement) -> None:
        """Return the device of this place if it was reserved separately; those of the start are held to the end."""
        group, _ = self._bundle_of.get(place.device_key, (None, 0))
        if group is not None and group is not self._groups[0]:
            remove_placement_group(group)
            self._groups.remove(group)
            del self._bundle_of[place.device_key]

    def options(self, place: RankPlacement) -> dict[str, object]:
        """Ray options of an actor at this place."""
        resources = _resources(place)
        options: dict[str, object] = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0)}
        options["resources"] = resources
        if place.share:
            group, index = self._bundle_of[place.device_key]
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        return options

    def release(self) -> None:
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        self._bundle_of.clear()


def _describe(shares: Mapping[Device, Mapping[str, float]]) -> str:
    """`2 cores on 10.0.0.1, 1 GPU on 10.0.0.2`."""
    words = []
    for (host, _), bundle in shares.items():
        noun, amount = ("GPU", bundle["GPU"]) if "GPU" in bundle else ("core", bundle["CPU"])
        words.append(f"{amount:g} {noun}{'s' * (amount != 1)}" + f" on {host}" * bool(host))
    return ", ".join(words)


def device_bundles(places: Sequence[RankPlacement]) -> dict[Device, dict[str, float]]:
    """One bundle per device, so that ranks which share a device are placed on the same one."""
    bundles: dict[Device, dict[str, float]] = {}
    for place in places:
        if place.share:
            bundle = bundles.setdefault(place.device_key, {})
            for resource, amount in _resources(place).items():
                bundle[resource] = bundle.get(resource, 0.0) + amount
    return bundles


def on_node(place: RankPlacement) -> dict[str, float]:
    """Resources that tie an actor to the node of a place."""
    return {f"node:{place.host}": _ON_NODE} if place.host else {}


def _resources(place: RankPlacement) -> dict[str, float]:
    if not place.share:
        return on_node(place)
    if place.kind == "cuda":
        return {"GPU": place.share, "CPU": 0.01, **on_node(place)}
    return {"CPU": place.share * max(1, len(place.cores)), **on_node(place)}
