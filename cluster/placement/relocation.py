"""Where ranks go whose node is gone: a pure law over the layout, the nodes that are left and what is free on them.

Ranks that shared a device share one again. Ranks of a role that were lost together stay together where a node has room
for all of them, if they can beside the rest of their role. Where everybody was at first is reserved for the engine, so
who finds that node back returns to it. Knows neither Ray nor when a node is to be called gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.config.schema import LaunchConfig
from cluster.placement.nodes import Node, allowed_nodes
from cluster.placement.ranks import RankPlacement

Layout = Mapping[str, RankPlacement]
"""Identity -> place."""


class NoRoom(Exception):
    """Nobody has room for ranks whose node is gone, for now: one line."""


def relocate(config: LaunchConfig, places: Layout, homes: Layout, nodes: Sequence[Node], role: str) -> Layout:
    """Places for the ranks of `role` whose node is not among `nodes`, and for those that shared their devices.

    `homes` are the places of the start; `nodes` say what is free on them now.
    """
    hosts = {node.host for node in nodes}
    lost = [ranks for ranks in _by_device(places) if ranks[0].host not in hosts]
    together = {place.role for ranks in lost for place in ranks if role in {one.role for one in ranks}}
    moving = [ranks for ranks in lost if any(place.role in together for place in ranks)]
    if not moving:
        return {}
    back = [homes[place.identity] for ranks in moving for place in ranks]
    if all(place.host in hosts for place in back):
        return {place.identity: place for place in back}
    allowed = [node for node in nodes if all(node in allowed_nodes(config, one, nodes) for one in together)]
    beside = {place.host for place in places.values() if place.role in together}
    allowed.sort(key=lambda node: node.host not in beside)
    targets = _choose(config, moving, allowed)
    return {
        place.identity: place
        for node in dict.fromkeys(targets)
        for place in _settle(node, [ranks for ranks, to in zip(moving, targets, strict=True) if to is node], places)
    }


def _by_device(places: Layout) -> list[list[RankPlacement]]:
    """Ranks that share a device; one that has no device is by itself."""
    devices: dict[object, list[RankPlacement]] = {}
    for place in places.values():
        name = place.cores if place.device == "cpu" else place.device
        devices.setdefault((place.host, name) if place.share else place.identity, []).append(place)
    return list(devices.values())


def _kind(ranks: Sequence[RankPlacement]) -> str:
    if not ranks[0].share:
        return ""
    return "cuda" if ranks[0].device.startswith("cuda") else "cpu"


def _choose(config: LaunchConfig, moving: list[list[RankPlacement]], allowed: list[Node]) -> list[Node]:
    """A node for each device that was lost."""
    (kind,) = {_kind(ranks) for ranks in moving}
    takes_turns = kind == "cpu" and config.cluster.oversubscribe
    if not kind and allowed:
        return [allowed[0]] * len(moving)
    for node in allowed:
        if kind and node.count(kind) >= len(moving):
            return [node] * len(moving)
    spread = [node for node in allowed if kind for _ in range(node.count(kind))]
    if len(spread) < len(moving) and takes_turns and allowed:
        spread = [allowed[index % len(allowed)] for index in range(len(moving))]
    if len(spread) < len(moving):
        raise NoRoom(_missing(config, moving, allowed, kind))
    return spread[: len(moving)]


def _missing(config: LaunchConfig, moving: list[list[RankPlacement]], allowed: list[Node], kind: str) -> str:
    who = ", ".join(place.identity for ranks in moving for place in ranks)
    gone = ", ".join(dict.fromkeys(ranks[0].host for ranks in moving))
    noun = {"cuda": "GPU", "cpu": "core", "": "node"}[kind] + "s" * (len(moving) > 1)
    free = ", ".join(f"{node.name} {node.count(kind)}" for node in allowed) if kind else ""
    elsewhere = f"free on the nodes it may use: {free}" if free else "there is no other node it may use"
    named = " or allow more nodes with placement.nodes" * bool(config.placement.nodes)
    return (
        f"{who}: node {gone} is gone; needed elsewhere: {len(moving)} {noun}, {elsewhere}; start Ray there again or on "
        f"another node{named}"
    )


def _settle(node: Node, moving: list[list[RankPlacement]], places: Layout) -> list[RankPlacement]:
    """Devices of the node for these ranks: numbers that nobody of ours uses there, as many cores as they had or fit."""
    there = [place for place in places.values() if place.host == node.host]
    core = max((core + 1 for place in there for core in place.cores), default=0)
    gpu = max((int(place.device[5:]) + 1 for place in there if place.device.startswith("cuda:")), default=0)
    settled = []
    for ranks in moving:
        if _kind(ranks) == "cuda":
            settled += [replace(place, host=node.host, device=f"cuda:{gpu}") for place in ranks]
            gpu += 1
        elif not ranks[0].share:
            settled += [replace(place, host=node.host) for place in ranks]
        elif not node.num_cores:  # they take turns with whoever is there
            settled += [replace(place, host=node.host, cores=(), num_threads=1, share=0.0) for place in ranks]
        else:
            count = max(1, min(len(ranks[0].cores), node.num_cores // len(moving)))
            cores = tuple(range(core, core + count))
            settled += [
                replace(place, host=node.host, cores=cores, num_threads=min(count, place.num_threads))
                for place in ranks
            ]
            core += count
    return settled
