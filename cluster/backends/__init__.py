"""Where the coordinator and the ranks live: threads of this process, or Ray actors. One engine, two ways to start it.

A backend starts everything, gives the address of the coordinator's hub, notices deaths, and ends what it started.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from actors.conductor import CoordinatorSpec
from cluster.config import LaunchConfig
from cluster.placement import RankPlacement


class Backend(Protocol):
    """The contract of a place to run."""

    def place(self, progress: Callable[[str], None]) -> list[RankPlacement]:
        """Which rank goes where; connects to the cluster if need be, and waits for what is missing."""

    def start(self, coordinator: CoordinatorSpec, places: list[RankPlacement], eos_token_ids: tuple[int, ...]) -> str:
        """Start coordinator and ranks without waiting for them; returns the hub's address."""

    def death(self) -> str | None:
        """One line about something that ended and should not have, or None."""

    def publish(self, file: Path) -> None:
        """Offer a copy of `file` where people look at the cluster, if there is such a place and it lasts."""

    def close(self) -> None:
        """End everything that was started. Called after the coordinator was told to stop, or instead."""


def make_backend(config: LaunchConfig, log_dir: Path | None = None) -> Backend:
    return BACKENDS[config.cluster.name](config, log_dir)


def _inprocess(config: LaunchConfig, log_dir: Path | None) -> Backend:
    from cluster.backends.inprocess import InprocessBackend

    return InprocessBackend(config, log_dir)


def _ray(config: LaunchConfig, log_dir: Path | None) -> Backend:
    from cluster.backends.on_ray import RayBackend

    return RayBackend(config, log_dir)


BACKENDS: dict[str, Callable[[LaunchConfig, Path | None], Backend]] = {
    "inprocess": _inprocess,
    "local": _ray,
    "existing": _ray,
    "slurm": _ray,
}
