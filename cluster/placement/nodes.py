"""Which rank runs on which node: the layout of `cluster/placement/ranks.py`, spread over the nodes of a cluster.

A role stays inside one node if one has room for it, because its ranks exchange tensors in every layer. Roles on CPUs
prefer a node of their own, roles on GPUs the first node with room. Pure: the roles come from the layout, and the nodes
each may use from the user's `placement.nodes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.config.schema import LaunchConfig, PlacementName
from cluster.placement.ranks import Devices, RankPlacement, lay_out, slice_cores, with_fewer_threads


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster: its address, its name, and its free devices."""

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
    """Every rank with its `host`, ranks in the order of the nodes. Raises ValueError where there is no room."""
    _check_named(config, nodes)
    if len(nodes) == 1:
        return _on(nodes[0], lay_out(config, nodes[0].devices))
    cores = tuple(range(sum(node.num_cores for node in nodes)))
    ranks = lay_out(config, Devices(cores, sum(node.num_gpus for node in nodes)))
    if config.placement.name == PlacementName.colocated:
        places = _together(config, nodes, ranks)
    else:
        places = _divide(ranks, _choose_nodes(config, nodes, ranks))
    return with_fewer_threads(config, places)


def _check_named(config: LaunchConfig, nodes: Sequence[Node]) -> None:
    known = {name for node in nodes for name in (node.host, node.name)}
    for role, wanted in config.placement.nodes.items():
        for name in wanted:
            if name not in known:
                there = ", ".join(node.name for node in nodes)
                raise ValueError(f"placement.nodes: {role} wants node {name}, which is not there; there are {there}")


def allowed_nodes(config: LaunchConfig, role: str, nodes: Sequence[Node]) -> list[Node]:
    """Nodes that the role may use; a lower level such as `draft2` those of `draft`, unless it has its own."""
    wanted = config.placement.nodes.get(role) or config.placement.nodes.get(role.rstrip("0123456789"))
    return [node for node in nodes if not wanted or node.host in wanted or node.name in wanted]


def _together(config: LaunchConfig, nodes: Sequence[Node], ranks: list[RankPlacement]) -> list[RankPlacement]:
    """Roles that share devices share a node; if no node has room for all ranks, they are spread over all nodes."""
    for node in nodes:
        if all(node in allowed_nodes(config, place.role, nodes) for place in ranks):
            try:
                return _on(node, lay_out(config, node.devices))
            except ValueError:
                continue
    if config.placement.nodes:
        raise ValueError("placement.nodes: no named node has room for every role; name fewer, or none")
    return [_localise(place, nodes) for place in ranks]


def _localise(place: RankPlacement, nodes: Sequence[Node]) -> RankPlacement:
    """Translate a place among the devices of all nodes into one on the node that has its first device."""
    if not place.share:
        return replace(place, host=nodes[0].host)
    kind = place.kind
    index = int(place.device.partition(":")[2]) if kind == "cuda" else place.cores[0]
    node, count = nodes[0], nodes[0].count(kind)
    for node in nodes:
        count = node.count(kind)
        if index < count:
            break
        index -= count
    if kind == "cuda":
        return replace(place, host=node.host, device=f"cuda:{index}")
    cores = tuple(range(index, min(index + len(place.cores), count)))
    return replace(place, host=node.host, cores=cores, num_threads=len(cores))


def _choose_nodes(config: LaunchConfig, nodes: Sequence[Node], ranks: list[RankPlacement]) -> dict[str, list[Node]]:
    """Role -> the node of each of its ranks. The role with the most ranks chooses first."""
    free = {(node, kind): node.count(kind) for node in nodes for kind in ("cpu", "cuda")}
    chosen: dict[str, list[Node]] = {}
    leads = [place for place in ranks if place.rank == 0]
    for place in sorted(leads, key=lambda place: -place.size):  # of equal sizes the role that is listed first
        role = place.role
        allowed = allowed_nodes(config, role, nodes)
        if not place.share:  # a lookup drafter needs no device of its own
            chosen[role] = [allowed[0]] * place.size
            continue
        oversubscribe = place.kind == "cpu" and config.cluster.oversubscribe
        chosen[role] = _choose(role, place.size, place.kind, allowed, free, oversubscribe=oversubscribe)
        for node in chosen[role]:
            free[node, place.kind] -= 1
    return chosen


def _choose(
    role: str, size: int, kind: str, allowed: list[Node], free: dict[tuple[Node, str], int], *, oversubscribe: bool
) -> list[Node]:
    roomy = [node for node in allowed if free[node, kind] >= size]
    if roomy:
        best = roomy[0] if kind == "cuda" else max(roomy, key=lambda node: _cores_each(node, size, free[node, kind]))
        return [best] * size
    spread = [node for node in allowed for _ in range(max(0, free[node, kind]))]
    with_cores = [node for node in allowed if node.num_cores]
    if len(spread) < size and oversubscribe and with_cores:
        spread += [with_cores[index % len(with_cores)] for index in range(size - len(spread))]
    if len(spread) < size:
        noun = "GPUs" if kind == "cuda" else "cores"
        there = ", ".join(f"{node.name} {free[node, kind]}" for node in allowed)
        raise ValueError(f"placement: {role} needs {size} {noun}; free on the nodes it may use: {there}")
    return sorted(spread[:size], key=allowed.index)


def _cores_each(node: Node, size: int, free: int) -> tuple[float, int]:
    """Cores per rank if `size` more came to this node, then minus its ranks: of equals the emptier node is best."""
    ranks_there = node.num_cores - free
    return node.num_cores / (ranks_there + size), -ranks_there


def _divide(ranks: list[RankPlacement], chosen: dict[str, list[Node]]) -> list[RankPlacement]:
    """Assign the devices of each node to its ranks, in order: GPUs one by one, cores in even shares."""
    node_of = {place.identity: chosen[place.role][place.rank] for place in ranks}
    on_cpu = Counter(node_of[place.identity] for place in ranks if place.share and place.device == "cpu")
    taken: Counter[tuple[Node, str]] = Counter()
    places = []
    for place in ranks:
        node = node_of[place.identity]
        if not place.share:
            places.append(replace(place, host=node.host))
            continue
        index, total = taken[node, place.kind], on_cpu[node]
        taken[node, place.kind] += 1
        if place.kind == "cuda":
            places.append(replace(place, host=node.host, device=f"cuda:{index}"))
            continue
        cores = slice_cores(range(node.num_cores), index, total)
        share = 1.0 / -(-total // node.num_cores)
        places.append(replace(place, host=node.host, cores=cores, num_threads=len(cores), share=share))
    return places


def _on(node: Node, places: list[RankPlacement]) -> list[RankPlacement]:
    return [replace(place, host=node.host) for place in places]
