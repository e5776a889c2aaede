"""The nodes of a running Ray cluster: what is free on them, and waiting until a layout fits.

Knows Ray's bookkeeping and the pure law in `cluster/placement/nodes.py`; starts and reserves nothing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from ipaddress import ip_address

import ray
from ray._private.state import available_resources_per_node  # Ray has no public way to ask node by node

from cluster.config.schema import LaunchConfig
from cluster.placement.nodes import Node, over_nodes
from cluster.placement.ranks import RankPlacement

HEAD = "node:__internal_head__"
_LOOK_S = 0.5
_SAY_S = 5.0
_KNOCK_S = 0.1


def free_nodes() -> list[Node]:
    """Nodes that are alive with what is free on them: the head first, then by address."""
    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (HEAD not in node["Resources"], ip_address(node["NodeManagerAddress"])))
    nodes = []
    for node in alive:
        resources = free.get(node["NodeID"], {})
        cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        nodes.append(Node(node["NodeManagerAddress"], node["NodeManagerHostname"], cores, gpus))
    return nodes


def living_hosts() -> set[str]:
    """Addresses of the nodes that Ray has not given up."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def await_layout(
    config: LaunchConfig,
    progress: Callable[[str], None],
    look: Callable[[], list[Node]] = free_nodes,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[RankPlacement]:
    """The layout, as soon as nodes and devices for it are free; says every few seconds what is missing.

    ValueError with the reason after `cluster.wait_s`.
    """
    started = said = clock()
    while True:
        nodes = look()
        try:
            _check_number(config.cluster.nodes, nodes)
            return over_nodes(config, nodes)
        except ValueError as error:
            missing = str(error)
        now = clock()
        if now - started >= config.cluster.wait_s:
            raise ValueError(f"{missing} (waited {now - started:.0f} s for it; cluster.wait_s sets how long)")
        if now - said >= _SAY_S:
            said = now
            progress(f"waiting for {now - started:.0f} s: {missing}")
        sleep(_LOOK_S)


def await_head(
    address: str, wait_s: float, progress: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Until somebody listens at HOST:PORT; ValueError after `wait_s`. Ray's own try is one, and its error a page."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # `auto`, or another of Ray's ways to name a cluster
    started = said = clock()
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        now = clock()
        if now - started >= wait_s:
            raise ValueError(f"cluster.address={address}: no Ray listens there after {now - started:.0f} s ({reason})")
        if now - said >= _SAY_S:
            said = now
            progress(f"waiting for {now - started:.0f} s: no Ray at {address} yet")
        time.sleep(_KNOCK_S)


def _check_number(wanted: int, nodes: list[Node]) -> None:
    if len(nodes) < wanted:
        there = ", ".join(f"{node.name} ({node.host})" for node in nodes)
        raise ValueError(
            f"cluster.nodes={wanted}: only {len(nodes)} joined: {there}; look at the logs of Ray on the others"
        )
