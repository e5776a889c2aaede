"""The nodes of a running Ray cluster: what is free on them, and waiting until a layout fits.

Reads Ray's state and applies the pure functions of `cluster/placement/nodes.py`; starts and reserves nothing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from ipaddress import ip_address

import ray
from ray._private.state import available_resources_per_node  # Ray has no public function for free resources by node

from cluster.config.schema import LaunchConfig
from cluster.placement.nodes import Node, over_nodes
from cluster.placement.ranks import RankPlacement

HEAD = "node:__internal_head__"
_CHECK_S = 0.5
_PROGRESS_S = 5.0
_CONNECT_S = 0.1


def free_nodes() -> list[Node]:
    """Live nodes and their free devices: the head first, then by address."""
    free, nodes = available_resources_per_node(), []
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (HEAD not in node["Resources"], ip_address(node["NodeManagerAddress"])))
    for node in alive:
        resources = free.get(node["NodeID"], {})
        cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        nodes.append(Node(node["NodeManagerAddress"], node["NodeManagerHostname"], cores, gpus))
    return nodes


def living_hosts() -> set[str]:
    """Addresses of the nodes that Ray regards as alive."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def await_layout(
    config: LaunchConfig,
    progress: Callable[[str], None],
    find_nodes: Callable[[], list[Node]] = free_nodes,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[RankPlacement]:
    """The layout, once nodes and devices for it are free; reports to `progress` what is missing.

    Raises ValueError with the reason after `cluster.wait_s`.
    """
    started = reported = clock()
    while True:
        nodes = find_nodes()
        try:
            if len(nodes) < (wanted := config.cluster.nodes):
                joined = ", ".join(f"{node.name} ({node.host})" for node in nodes)
                remedy = "look at the logs of Ray on the others"
                raise ValueError(f"cluster.nodes={wanted}: only {len(nodes)} joined: {joined}; {remedy}")
            return over_nodes(config, nodes)
        except ValueError as error:
            missing = str(error)
        now = clock()
        if now - started >= config.cluster.wait_s:
            raise ValueError(f"{missing} (waited {now - started:.0f} s for it; cluster.wait_s sets how long)")
        if now - reported >= _PROGRESS_S:
            reported = now
            progress(f"waiting for {now - started:.0f} s: {missing}")
        sleep(_CHECK_S)


def await_head(
    address: str, wait_s: float, progress: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Until a process listens at HOST:PORT; raises ValueError after `wait_s`. Ray itself tries once."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # `auto`, or another of Ray's names for a cluster
    started = reported = clock()
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        now = clock()
        if now - started >= wait_s:
            raise ValueError(f"cluster.address={address}: no Ray listens there after {now - started:.0f} s ({reason})")
        if now - reported >= _PROGRESS_S:
            reported = now
            progress(f"waiting for {now - started:.0f} s: no Ray at {address} yet")
        time.sleep(_CONNECT_S)
