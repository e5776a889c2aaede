"""Where the coordinator and the ranks run: as threads of this process, or as Ray actors.

A backend starts them, gives the addresses of the coordinator's hub, reports deaths, starts successors, and ends what it
started. Whether a process is replaced is decided by the supervisor.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.coordinator.spec import CoordinatorSpec
from actors.protocol.membership import Death, Weights, identity_of
from actors.topology import seat_role
from actors.transport.keys import SECRET_BYTES, HubKeys, LinkKey
from actors.worker import openmp
from actors.worker.spec import RankSpec
from cluster.config.schema import ClusterName, LaunchConfig
from cluster.placement.memory import sharing
from cluster.placement.ranks import RankPlacement

if TYPE_CHECKING:
    from cluster.runtime.delay_proxy import Relay

LOOPBACK = "127.0.0.1"
LENT_SILENCE_S = 2.0
"""Seconds without a heartbeat after which such a rank counts as lost, where `cluster.silence_s` is 0."""


class Backend(ABC):
    """A place to run one engine; `progress` receives lines for the user."""

    can_kill = True
    """Whether a process that hangs can be ended."""

    def __init__(self, config: LaunchConfig, progress: Callable[[str], None]) -> None:
        self._config = config
        self._progress = progress
        self._placements: dict[str, RankPlacement] = {}
        self._specs: dict[str, RankSpec] = {}
        self._relay: Relay | None = None
        self.keys = HubKeys(secrets.token_bytes(SECRET_BYTES))
        """Keys of the hub and its peers: a rank receives its own in its specification, a client from the user."""
        self.address = ""
        """Address of the coordinator's hub for ranks and the engine, known from `start` on. It changes, as
        `client_address` does, when the coordinator is replaced on another node."""
        self.client_address = ""
        """Address of the hub for other clients."""
        self.weights = Weights(config.target.path)
        """What the target serves, for a coordinator that is replaced."""

    @property
    def _needs_store(self) -> bool:
        """Whether ranks form process groups."""
        config, places = self._config, self._placements.values()
        return config.drafter.is_bridged(config.pipeline.name) or any(place.size > 1 for place in places)

    def hub_address(self, role: str) -> str:
        """Where ranks of this role connect, those that pools lend too."""
        return self.address if role == "target" or self._relay is None else self._relay.address

    def _hub_host(self, default: str) -> str:
        """The address to listen at: `default`, unless that is this machine alone, and a draft pool on another one is to
        connect."""
        if default != LOOPBACK or not is_lent(self._config):
            return default
        from cluster.runtime.pool_leases import host_for

        return host_for([address for address, _ in self._config.drafter.lenders])

    @property
    def places(self) -> list[RankPlacement]:
        """Where each rank is, or is about to be."""
        return list(self._placements.values())

    @abstractmethod
    def place(self) -> list[RankPlacement]:
        """Chooses a place for each rank; connects to the cluster if need be, and waits for what is missing."""

    @abstractmethod
    def start(self, coordinator: CoordinatorSpec, places: list[RankPlacement]) -> None:
        """Start coordinator and ranks without waiting for them; the addresses are known then."""

    @abstractmethod
    def deaths(self, timeout_s: float) -> list[Death]:
        """Processes that ended, each once; waits for the first one at most so long."""

    @abstractmethod
    def replace(self, identity: str, incarnation: int, facts: Mapping[str, object]) -> None:
        """Start a successor, without waiting for it, in the same place or, if that node is gone, elsewhere.

        `facts` are what the predecessor measured. Raises NoRoom, and starts nothing, while no node has room.
        """

    @abstractmethod
    def kill(self, identity: str, pid: int | None) -> None:
        """End a process that does not answer; `deaths` reports it. `pid` is None if it has not sent one yet."""

    @abstractmethod
    def close(self, *, graceful: bool = False) -> None:
        """End everything that was started; `graceful` if the coordinator has stopped all loops already."""

    def stranded(self) -> set[str]:
        """Identities whose node is gone."""
        return set()

    def publish(self, file: Path) -> None:  # noqa: B027 (only one backend has such a place)
        """Copy `file` to the cluster's dashboard, if there is one that outlives the engine."""

    def serves(self, weights: Weights) -> None:
        """The target serves these weights from now on."""
        self.weights = weights

    def _admit(self, places: Sequence[RankPlacement]) -> None:
        self.keys = replace(self.keys, peers=(*(place.identity for place in places), *lent_ranks(self._config)))

    def _open_relay(self) -> None:
        """Delay the records of the drafters by `cluster.link_delay_ms`, each way."""
        if delay_ms := self._config.cluster.link_delay_ms:
            from cluster.runtime.delay_proxy import Relay

            self._relay = Relay(self.address, delay_ms / 1e3, f"{self.address.rpartition(':')[0]}:*")

    def _specify(self, place: RankPlacement, host: str, eos_token_ids: tuple[int, ...]) -> RankSpec:
        """What the rank needs to start, kept for its successors."""
        address = self.hub_address(place.role)
        part = sharing(self._config, self.places, place)
        spec = rank_spec(self._config, place, address, host, eos_token_ids, self.keys.of(place.identity), part)
        self._specs[place.identity] = spec
        return spec


def settle_threads(config: LaunchConfig) -> None:
    """Settle how threads wait in this process, if it will hold ranks; without effect once PyTorch is loaded."""
    if config.cluster.name == ClusterName.inprocess:
        openmp.configure_threads(shared=config.placement.name == "colocated")


def make_backend(config: LaunchConfig, log_dir: Path | None, progress: Callable[[str], None]) -> Backend:
    if config.cluster.name == ClusterName.inprocess:
        settle_threads(config)
        from cluster.runtime.inprocess import InprocessBackend

        return InprocessBackend(config, log_dir, progress)
    from cluster.runtime.ray_backend import RayBackend

    return RayBackend(config, log_dir, progress)


def coordinator_spec(
    config: LaunchConfig, places: Sequence[RankPlacement], eos_token_ids: tuple[int, ...]
) -> CoordinatorSpec:
    """What the coordinator needs before it starts."""
    sizes = Counter(place.role for place in places)
    return CoordinatorSpec(
        pipeline=config.pipeline.name,
        num_draft_tokens=config.drafter.num_draft_tokens,
        target_ranks=sizes.pop("target"),
        draft_ranks=sizes.pop("draft", 0) or is_lent(config),
        num_seats=max(1, len(lent_ranks(config))),
        eos_token_ids=eos_token_ids,
        limits=config.scheduler,
        level_ranks=tuple(sizes.values()),
        silence_s=config.cluster.silence_s,
        adaptive=config.pipeline.adaptive,
        min_draft_tokens=config.pipeline.min_draft_tokens,
        chooses_lengths=config.drafter.chooses_lengths,
        scores_drafts=config.drafter.scores_drafts,
        runs_passes=config.drafter.runs_passes,
        drafters=config.drafter.names_in(config.pipeline.name),
        attached=config.drafter.is_attached(config.pipeline.name),
        bridged=config.drafter.is_bridged(config.pipeline.name),
        local_drafter=config.pipeline.local_drafter if config.pipeline.name.works_ahead else "none",
        weights=Weights(config.target.path),
        lent_silence_s=(config.cluster.silence_s or LENT_SILENCE_S) if is_lent(config) else 0.0,
    )


def is_lent(config: LaunchConfig) -> bool:
    """Whether the engine's draft ranks are lent by pools."""
    return config.drafter.is_elsewhere and config.pipeline.name.drafts


def lent_ranks(config: LaunchConfig) -> list[str]:
    """The draft ranks that pools lend, by their seats."""
    num_seats = config.drafter.num_seats if is_lent(config) else 0
    return [identity_of(seat_role(seat), 0) for seat in range(num_seats)]


def rank_spec(
    config: LaunchConfig,
    place: RankPlacement,
    hub_address: str,
    host: str,
    eos_token_ids: tuple[int, ...],
    key: LinkKey | None = None,
    sharing: tuple[int, float] = (0, 1.0),
) -> RankSpec:
    """What a rank needs before it starts."""
    return RankSpec(
        role=place.role,
        rank=place.rank,
        size=place.size,
        device=place.device,
        num_threads=place.num_threads,
        cores=place.bound_to,
        hub_address=hub_address,
        host=host,
        eos_token_ids=eos_token_ids,
        target=config.target,
        drafter=config.drafter,
        verify=config.verify,
        pipeline=str(config.pipeline.name),
        scheduler=config.scheduler,
        adaptive=config.pipeline.adaptive,
        key=key,
        neighbour_bytes=sharing[0],
        memory_part=sharing[1],
        is_thread=config.cluster.name == ClusterName.inprocess,
    )
