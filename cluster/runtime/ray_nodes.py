"""The nodes of a running Ray cluster: what is free on them, and waiting until a layout fits.

Reads Ray's state and applies the pure functions of `cluster/placement/nodes.py`; starts and reserves nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import TypeVar

import ray
from ray._private.state import available_resources_per_node  # Ray has no public function for free resources by node
from ray._raylet import AuthenticationTokenLoader, GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import AuthenticationError

from cluster.config.schema import ClusterConfig, ClusterName, LaunchConfig
from cluster.placement.nodes import Node, over_nodes
from cluster.placement.ranks import Devices, RankPlacement
from cluster.runtime.ray_local import settle

HEAD = "node:__internal_head__"
_CHECK_S = 0.25
_PROGRESS_S = 5.0
_HEAD_S = 3.0
"""How long the head of an existing cluster may take to answer."""

Result = TypeVar("Result")


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


def free_here() -> Devices:
    """Free devices of the node on which this process runs."""
    free = available_resources_per_node().get(ray.get_runtime_context().get_node_id(), {})
    return Devices(tuple(range(int(free.get("CPU", 0)))), int(free.get("GPU", 0)))


def living_hosts() -> set[str]:
    """Addresses of the nodes that Ray regards as alive."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def await_layout(config: LaunchConfig, progress: Callable[[str], None]) -> list[RankPlacement]:
    """The layout, once nodes and devices for it are free. Raises ValueError with the reason after `cluster.wait_s`."""

    def lay_out() -> list[RankPlacement]:
        nodes = free_nodes()
        if len(nodes) < (wanted := config.cluster.nodes):
            joined = ", ".join(f"{node.name} ({node.host})" for node in nodes)
            remedy = "look at the logs of Ray on the others"
            raise ValueError(f"cluster.nodes={wanted}: only {len(nodes)} joined: {joined}; {remedy}")
        return over_nodes(config, nodes)

    return _await(lay_out, config.cluster.wait_s, ": to wait longer, raise cluster.wait_s", progress)


def await_head(config: ClusterConfig, progress: Callable[[str], None]) -> None:
    """Wait until a process listens at `address`; Ray itself tries once. Raises ValueError if none does.

    The head of a Slurm job may come later than the launch; that of an existing cluster is there, or is not.
    """
    host, _, port = config.address.rpartition(":")

    def reach() -> None:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"cluster.address={config.address}: no Ray listens there ({reason})") from error

    _await(reach, config.wait_s if config.name == ClusterName.slurm else _HEAD_S, "", progress)


def _await(attempt: Callable[[], Result], wait_s: float, remedy: str, progress: Callable[[str], None]) -> Result:
    """What `attempt` returns, as soon as it raises no ValueError; reports to `progress` now and then what it raises."""
    started = reported = time.monotonic()
    while True:
        try:
            return attempt()
        except ValueError as error:
            missing = str(error)
        now = time.monotonic()
        if now - started >= wait_s:
            raise ValueError(f"{missing}; gave up after {now - started:.0f} s{remedy}")
        if now - reported >= _PROGRESS_S:
            reported = now
            progress(f"waiting for {now - started:.0f} s: {missing}")
        time.sleep(_CHECK_S)


def check_admitted(address: str) -> None:
    """Raises ValueError if the Ray at HOST:PORT refuses this process's token; Ray itself tries for half a minute."""
    if "RAY_AUTH_MODE" not in os.environ and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        settle({"RAY_AUTH_MODE": "token"})  # as newer versions of Ray do
    try:
        GcsClient(address=address)
    except AuthenticationError as error:
        remedy = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file with it"
        raise ValueError(f"cluster.address={address}: that Ray asks for another token; {remedy}") from error
