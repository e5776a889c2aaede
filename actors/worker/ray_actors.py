"""Two Ray actor classes, for a rank and for the coordinator. Each owns a process and nothing else.

`run` is called once and lasts for the session; its object ref resolves when the process ends. No round passes through
Ray. What they run (`factory.serve`, `CoordinatorService.run`) is what the in-process backend runs in threads.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray

from actors.logs import LogSpec, dump_stacks_on_signal, open_logs
from actors.transport.channel import Hub
from actors.transport.keys import HubKeys
from actors.worker import openmp
from actors.worker.spec import RankSpec

if TYPE_CHECKING:
    from actors.coordinator.spec import CoordinatorSpec
    from actors.coordinator.stats import Watch
    from parallel.comm.rendezvous import HostedStore

SHOW_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Environment of a rank on a GPU."""


def session_logs() -> Path:
    """The folder of this engine on the Logs page of the dashboard, on this node."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name() / "logs" / context.namespace


def open_actor_logs(name: str, spec: LogSpec) -> None:
    """The logs of an actor's process, also on the dashboard."""
    file = open_logs(name, replace(spec, directories=(*spec.directories, str(session_logs()))), sys.stderr)
    dump_stacks_on_signal(file)


class RankWorker:
    """The process of one target or draft rank, which has this `share` of its device.

    Dashboard and log prefixes show `title`.
    """

    def __init__(self, identity: str, title: str = "", logs: LogSpec | None = None, share: float = 1.0) -> None:
        self._identity = identity
        self._title = title or identity
        self._status = "starting"
        if logs is not None:
            open_actor_logs(identity, logs)
        openmp.configure_threads(shared=share < 1)
        # Loads PyTorch: not when the driver imports this class, and not as late as `run`, which waits for the hub.
        from actors.worker.factory import serve

        self._serve = serve

    def __repr__(self) -> str:
        return self._title

    def run(self, spec: RankSpec, interface: str = "") -> None:
        """Serve until `Stop`."""
        host = spec.host or _own_address(interface)
        device = spec.device
        if device.startswith("cuda"):
            own = ray.get_runtime_context().get_accelerator_ids()["GPU"][0]
            device = visible_device(own, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._serve(replace(spec, host=host, device=device, folder=_own_folder()), observe=self._set_status)
        self._status = "ended"

    @ray.method(concurrency_group="ctl")
    def status(self) -> str:
        """One line; also available while `run` is busy."""
        return f"{self._identity} pid={os.getpid()} {self._status}"

    def _set_status(self, status: str) -> None:
        self._status = status


def visible_device(own: str, visible: str | None) -> str:
    """The name in PyTorch of the GPU that Ray calls `own`, in a process with this `CUDA_VISIBLE_DEVICES`.

    Ray would hide all others (`SHOW_ALL_GPUS` tells it not to); then each rank's is the first, and ranks cannot map
    each other's memory, which symmetric memory needs.
    """
    names = visible.split(",") if visible else []
    return f"cuda:{names.index(own) if own in names else int(own) if not names else 0}"


class CoordinatorWorker:
    """The process of the coordinator: needs no device; hosts the store where ranks of a role form their group."""

    def __init__(self, title: str = "coordinator", logs: LogSpec | None = None) -> None:
        self._title = title
        self._hub: Hub | None = None
        self._store: HostedStore | None = None
        if logs is not None:
            open_actor_logs("coordinator", logs)

    def __repr__(self) -> str:
        return self._title

    def bind(
        self,
        host: str,
        ports: tuple[int, int],
        keys: HubKeys,
        needs_store: bool,
        interface: str = "",
        bind_wait_s: float = 0.0,
        *,
        is_alone: bool = False,
    ) -> tuple[str, str]:
        """Listen on these ports (0 for any free one) of `host` ("" for this node's address), on the first for ranks and
        the engine, on the second for other clients; returns the hub's addresses. `is_alone`: all ranks are on this
        machine, whatever the address.

        The ports of a predecessor may stay taken for a moment: a successor waits for them up to `bind_wait_s`.
        """
        host = host or _own_address(interface)
        address, client_address = [f"tcp://{host}:{port or '*'}" for port in ports]
        self._hub = Hub(address, keys, bind_wait_s, client_address=client_address, folder=_own_folder())
        if needs_store:
            self._store = _open_store("" if is_alone else host)
        return self._hub.address, self._hub.client_address

    def run(
        self,
        spec: CoordinatorSpec,
        make_watches: Sequence[Callable[[], Watch]] = (),
        bound: tuple[str, str] | None = None,  # noqa: ARG002 (where `bind` has failed, Ray ends this call with its error)
    ) -> str:
        """Serve until `Stop`; returns its reason. `bound` is what `bind` has returned."""
        from actors.coordinator.service import CoordinatorService  # for this process alone

        assert self._hub is not None, "bind() is called first"
        try:
            place = self._store and self._store.place
            return CoordinatorService(spec, self._hub, [make() for make in make_watches], place).run()
        finally:
            self._hub.close()

    @ray.method(concurrency_group="ctl")
    def status(self) -> str:
        return f"coordinator pid={os.getpid()}"


def _open_store(host: str) -> HostedStore:
    """Open the store in the folder of Ray, which is this user's, if all processes are on this machine (host "")."""
    from parallel.comm.rendezvous import LOOPBACK, store_in_file, store_on_network

    if host in ("", LOOPBACK):
        return store_in_file(Path(ray.get_runtime_context().get_temp_dir()))
    return store_on_network(host)


def _own_folder() -> str:
    """That of this Ray, if the engine has started it: on each node it is the user's alone."""
    return os.environ.get("RAY_TMPDIR", "")


def _own_address(interface: str) -> str:
    """This node's address on the interface, or the one Ray uses. Raises ValueError if there is none."""
    if not interface:
        return ray.util.get_node_ip_address()
    addresses = psutil.net_if_addrs()
    for address in addresses.get(interface, ()):
        if address.family == socket.AF_INET:
            return address.address
    raise ValueError(
        f"cluster.interface={interface}: node {socket.gethostname()} has no such interface with an IPv4 address; "
        f"it has {', '.join(sorted(addresses))}"
    )


_OPTIONS: dict[str, Any] = {"concurrency_groups": {"ctl": 1}, "max_restarts": 0}
RankActor = ray.remote(**_OPTIONS)(RankWorker)
CoordinatorActor = ray.remote(num_cpus=0, **_OPTIONS)(CoordinatorWorker)
