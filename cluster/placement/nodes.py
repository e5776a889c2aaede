"""Which rank runs on which node: the layout of `cluster/placement/ranks.py`, spread over the nodes of a cluster.

A role stays inside one node when one has room for it, because its ranks exchange tensors in every layer; roles on CPUs
seek nodes of their own, roles on GPUs the first node with room. Pure, and knows no role by name: who there is comes
out of the layout, and who may go where is the user's `placement.nodes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.config.schema import LaunchConfig, PlacementName
from cluster.placement.ranks import Devices, RankPlacement, lay_out, with_fewer_threads


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster: its address, its name, and the devices nobody uses."""

    host: str
    name: str
    num_cores: int
    num_gpus: int = 0

    @property
    def devices(self) -> Devices:
        return Devices(tuple(range(self.num_cores)), self.num_gpus)

    def count(self, kind: str) -> int:
        return self.num_gpus if kind == "cuda" else self.num_cores


def over_nodes(config: LaunchConfig, nodes: Sequence[Node]) -> list[RankPlacement]:
    """Every rank with the `host` it belongs on, ranks in the order of the nodes. ValueError where there is no room."""
    return with_fewer_threads(config, _with_hosts(config, nodes))


def _with_hosts(config: LaunchConfig, nodes: Sequence[Node]) -> list[RankPlacement]:
    _check_named(config, nodes)
    if len(nodes) == 1:
        return _on(nodes[0], lay_out(config, nodes[0].devices))
    cores = tuple(range(sum(node.num_cores for node in nodes)))
    ranks = lay_out(config, Devices(cores, sum(node.num_gpus for node in nodes)))
    if config.placement.name == PlacementName.colocated:
        return _together(config, nodes, ranks)
    homes = _homes(config, nodes, ranks)
    return _divide(nodes, ranks, homes)


def _check_named(config: LaunchConfig, nodes: Sequence[Node]) -> None:
    known = {name for node in nodes for name in (node.host, node.name)}
    for role, wanted in config.placement.nodes.items():
        for name in wanted:
            if name not in known:
                there = ", ".join(node.name for node in nodes)
                raise ValueError(f"placement.nodes: {role} wants node {name}, which is not there; there are {there}")


def allowed_nodes(config: LaunchConfig, role: str, nodes: Sequence[Node]) -> list[Node]:
    """A level beneath another, such as `draft2`, goes where `draft` may go unless told otherwise."""
    wanted = config.placement.nodes.get(role) or config.placement.nodes.get(role.rstrip("0123456789"))
    return [node for node in nodes if not wanted or node.host in wanted or node.name in wanted]


def _together(config: LaunchConfig, nodes: Sequence[Node], ranks: list[RankPlacement]) -> list[RankPlacement]:
    """Roles that share devices share a node; only ranks that no node has room for are dealt out over all of them."""
    for node in nodes:
        if all(node in allowed_nodes(config, place.role, nodes) for place in ranks):
            try:
                return _on(node, lay_out(config, node.devices))
            except ValueError:
                continue
    if config.placement.nodes:
        raise ValueError("placement.nodes: no named node has room for every role; name fewer, or none")
    return [_localised(place, nodes) for place in ranks]


def _localised(place: RankPlacement, nodes: Sequence[Node]) -> RankPlacement:
    """A place among the devices of all nodes in a row, as a place on the node that has its first device."""
    kind = "cuda" if place.device.startswith("cuda") else "cpu"
    if not place.share:
        return replace(place, host=nodes[0].host)
    index = int(place.device.partition(":")[2]) if kind == "cuda" else place.cores[0]
    for node in nodes:
        count = node.count(kind)
        if index < count:
            break
        index -= count
    if kind == "cuda":
        return replace(place, host=node.host, device=f"cuda:{index}")
    cores = tuple(range(index, min(index + len(place.cores), count)))
    return replace(place, host=node.host, cores=cores, num_threads=len(cores))


def _homes(config: LaunchConfig, nodes: Sequence[Node], ranks: list[RankPlacement]) -> dict[str, list[Node]]:
    """Role -> the node of each of its ranks. The role with the most ranks chooses first."""
    free = {(node, kind): node.count(kind) for node in nodes for kind in ("cpu", "cuda")}
    homes: dict[str, list[Node]] = {}
    leads = [place for place in ranks if place.rank == 0]
    for place in sorted(leads, key=lambda place: -place.size):  # of equal sizes the role that is listed first
        role = place.role
        allowed = allowed_nodes(config, role, nodes)
        if not place.share:  # a lookup drafter needs no device of its own
            homes[role] = [allowed[0]] * place.size
            continue
        kind = "cuda" if place.device.startswith("cuda") else "cpu"
        takes_turns = kind == "cpu" and config.cluster.oversubscribe
        homes[role] = _choose(role, place.size, kind, allowed, free, takes_turns)
        for node in homes[role]:
            free[node, kind] -= 1
    return homes


def _choose(
    role: str, size: int, kind: str, allowed: list[Node], free: dict[tuple[Node, str], int], takes_turns: bool
) -> list[Node]:
    roomy = [node for node in allowed if free[node, kind] >= size]
    if roomy:
        best = roomy[0] if kind == "cuda" else max(roomy, key=lambda node: _cores_each(node, size, free[node, kind]))
        return [best] * size
    spread = [node for node in allowed for _ in range(max(0, free[node, kind]))]
    if len(spread) < size and takes_turns:
        spread += [allowed[index % len(allowed)] for index in range(size - len(spread))]
    if len(spread) < size:
        noun = "GPUs" if kind == "cuda" else "cores"
        there = ", ".join(f"{node.name} {free[node, kind]}" for node in allowed)
        raise ValueError(f"placement: {role} needs {size} {noun}; free on the nodes it may use: {there}")
    return sorted(spread[:size], key=allowed.index)


def _cores_each(node: Node, size: int, free: int) -> tuple[float, int]:
    """How many cores a rank would have if `size` more came to this node; of equals, the node with fewer ranks."""
    ranks_there = node.num_cores - free
    return node.num_cores / (ranks_there + size), -ranks_there


def _divide(nodes: Sequence[Node], ranks: list[RankPlacement], homes: dict[str, list[Node]]) -> list[RankPlacement]:
    """Devices of each node to the ranks on it, in order: GPUs one by one, cores in even shares."""
    home = {place.identity: homes[place.role][place.rank] for place in ranks}
    on_cpu = Counter(home[place.identity] for place in ranks if place.share and place.device == "cpu")
    taken: Counter[tuple[Node, str]] = Counter()
    places = []
    for place in ranks:
        node = home[place.identity]
        if not place.share:
            places.append(replace(place, host=node.host))
            continue
        kind = "cuda" if place.device.startswith("cuda") else "cpu"
        index, total = taken[node, kind], on_cpu[node]
        taken[node, kind] += 1
        if kind == "cuda":
            places.append(replace(place, host=node.host, device=f"cuda:{index}"))
            continue
        first, end = node.num_cores * index // total, node.num_cores * (index + 1) // total
        cores = tuple(range(first, end)) or (index % node.num_cores,)
        share = 1.0 / -(-total // node.num_cores)
        places.append(replace(place, host=node.host, cores=cores, num_threads=len(cores), share=share))
    return places


def _on(node: Node, places: list[RankPlacement]) -> list[RankPlacement]:
    return [replace(place, host=node.host) for place in places]
