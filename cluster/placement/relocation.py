"""New places for ranks whose node is gone: a pure function of the layout, the live nodes and their free devices.

Ranks that shared a device share one again. Ranks of a role that were lost together stay together if a node has room for
all of them, preferably a node of the rest of their role. The devices of the start stay reserved for the engine, so
ranks return to that node if it is back. Knows neither Ray nor when a node counts as gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.config.schema import LaunchConfig
from cluster.placement.nodes import Node, allowed_nodes
from cluster.placement.ranks import NoRoom, RankPlacement

Places = Mapping[str, RankPlacement]
"""Places of ranks by the ranks' names, such as `target-0`."""


def relocate(config: LaunchConfig, places: Places, homes: Places, nodes: Sequence[Node], role: str) -> Places:
    """Places for the ranks of `role` whose node is not among `nodes`, and for those that shared their devices.

    `homes` are the places of the start; `nodes` say what is free on them now.
    """
    hosts = {node.host for node in nodes}
    lost = [ranks for ranks in _by_device(places) if ranks[0].host not in hosts]
    together = {place.role for ranks in lost for place in ranks if role in {other.role for other in ranks}}
    moving = [ranks for ranks in lost if any(place.role in together for place in ranks)]
    if not moving:
        return {}
    back = [homes[place.identity] for ranks in moving for place in ranks]
    if all(place.host in hosts for place in back):
        return {place.identity: place for place in back}
    allowed = [node for node in nodes if all(node in allowed_nodes(config, name, nodes) for name in together)]
    beside = {place.host for place in places.values() if place.role in together}
    allowed.sort(key=lambda node: node.host not in beside)
    targets = _choose(config, moving, allowed)
    return {
        place.identity: place
        for node in dict.fromkeys(targets)
        for place in _assign(node, [ranks for ranks, to in zip(moving, targets, strict=True) if to is node], places)
    }


def _by_device(places: Places) -> list[list[RankPlacement]]:
    """Ranks that share a device; a rank without one is by itself."""
    devices: dict[object, list[RankPlacement]] = {}
    for place in places.values():
        devices.setdefault(place.device_key if place.share else place.identity, []).append(place)
    return list(devices.values())


def _kind(ranks: Sequence[RankPlacement]) -> str:
    return ranks[0].kind if ranks[0].share else ""


def _choose(config: LaunchConfig, moving: list[list[RankPlacement]], allowed: list[Node]) -> list[Node]:
    """A node for each lost device."""
    kind = max(_kind(ranks) for ranks in moving)  # none of those that take turns
    oversubscribe = kind == "cpu" and config.cluster.oversubscribe
    if not kind and allowed:
        return [allowed[0]] * len(moving)
    for node in allowed:
        if kind and node.count(kind) >= len(moving):
            return [node] * len(moving)
    spread = [node for node in allowed if kind for _ in range(node.count(kind))]
    if len(spread) < len(moving) and oversubscribe and allowed:
        spread = [allowed[index % len(allowed)] for index in range(len(moving))]
    if len(spread) < len(moving):
        raise NoRoom(_missing(config, moving, allowed, kind))
    return spread[: len(moving)]


def _missing(config: LaunchConfig, moving: list[list[RankPlacement]], allowed: list[Node], kind: str) -> str:
    identities = ", ".join(place.identity for ranks in moving for place in ranks)
    gone = ", ".join(dict.fromkeys(ranks[0].host for ranks in moving))
    noun = {"cuda": "GPU", "cpu": "core", "": "node"}[kind] + "s" * (len(moving) > 1)
    free = ", ".join(f"{node.name} {node.count(kind)}" for node in allowed) if kind else ""
    elsewhere = f"free on the nodes it may use: {free}" if free else "there is no other node it may use"
    named = " or allow more nodes with placement.nodes" * bool(config.placement.nodes)
    return (
        f"{identities}: node {gone} is gone; needed elsewhere: {len(moving)} {noun}, {elsewhere}; start Ray there "
        f"again or on another node{named}"
    )


def _assign(node: Node, moving: list[list[RankPlacement]], places: Places) -> list[RankPlacement]:
    """Devices of the node for these ranks: numbers unused by this engine, and as many cores as they had, or as fit."""
    there = [place for place in places.values() if place.host == node.host]
    core = max((core + 1 for place in there for core in place.cores), default=0)
    gpu = max((int(place.device[5:]) + 1 for place in there if place.kind == "cuda"), default=0)
    assigned = []
    for ranks in moving:
        if _kind(ranks) == "cuda":
            assigned += [replace(place, host=node.host, device=f"cuda:{gpu}") for place in ranks]
            gpu += 1
        elif not ranks[0].share:
            assigned += [replace(place, host=node.host) for place in ranks]
        elif not node.num_cores:  # they take turns with the ranks there
            assigned += [replace(place, host=node.host, cores=(), num_threads=1, share=0.0) for place in ranks]
        else:
            count = max(1, min(len(ranks[0].cores), node.num_cores // len(moving)))
            cores = tuple(range(core, core + count))
            assigned += [
                replace(place, host=node.host, cores=cores, num_threads=min(count, place.num_threads))
                for place in ranks
            ]
            core += count
    return assigned
