"""Where the coordinator and the ranks live: threads of this process, or Ray actors. One engine, two ways to start it.

A backend starts everything, gives the address of the coordinator's hub, notices deaths, replaces whom it is told to,
and ends what it started. Whether somebody is replaced is not for it to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from actors.coordinator.service import CoordinatorSpec
from actors.protocol.membership import Death
from cluster.config.schema import LaunchConfig
from cluster.placement.ranks import RankPlacement


class Backend(Protocol):
    """The contract of a place to run."""

    can_kill: bool
    """Whether one that hangs can be ended."""
    places: list[RankPlacement]
    """Where everybody is, or is about to be."""
    address: str
    """Of the coordinator's hub; another one only after the coordinator was replaced elsewhere."""

    def place(self, progress: Callable[[str], None]) -> list[RankPlacement]:
        """Which rank goes where; connects to the cluster if need be, and waits for what is missing."""

    def start(self, coordinator: CoordinatorSpec, places: list[RankPlacement], eos_token_ids: tuple[int, ...]) -> str:
        """Start coordinator and ranks without waiting for them; returns the hub's address."""

    def deaths(self, timeout_s: float) -> list[Death]:
        """What ended and should not have, each once; waits so long for the first."""

    def kill(self, identity: str, pid: int | None) -> None:
        """End a process that does not answer; its death is noticed like any other. Without a `pid` it is too young to
        have told it."""

    def replace(self, identity: str, incarnation: int, facts: Mapping[str, object]) -> None:
        """Start a successor, without waiting for it, where the last one was or, if that node is gone, elsewhere.

        `facts` are what the last one measured. NoRoom, and nothing is started, while there is nowhere to go.
        """

    def stranded(self) -> set[str]:
        """Who belongs on a node that is gone."""

    def publish(self, file: Path) -> None:
        """DraftOutcome a copy of `file` where people look at the cluster, if there is such a place and it lasts."""

    def close(self, *, told: bool) -> None:
        """End everything that was started; `told` says that the coordinator was told to stop, and has said so."""


def make_backend(config: LaunchConfig, log_dir: Path | None = None) -> Backend:
    return BACKENDS[config.cluster.name](config, log_dir)


def _inprocess(config: LaunchConfig, log_dir: Path | None) -> Backend:
    from cluster.runtime.inprocess import InprocessBackend

    return InprocessBackend(config, log_dir)


def _ray(config: LaunchConfig, log_dir: Path | None) -> Backend:
    from cluster.runtime.ray_backend import RayBackend

    return RayBackend(config, log_dir)


BACKENDS: dict[str, Callable[[LaunchConfig, Path | None], Backend]] = {
    "inprocess": _inprocess,
    "local": _ray,
    "existing": _ray,
    "slurm": _ray,
}
