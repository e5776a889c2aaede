"""Which rank runs where: a pure function from the user's options and the available devices to one place per rank.

Knows counts of devices, not what runs on them. All backends use the same layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from actors.topology import TOP
from cluster.config.schema import LaunchConfig

if TYPE_CHECKING:
    from actors.drafters.model.config import ModelDrafterConfig
    from actors.drafters.speculator.config import SpeculatorDrafterConfig

    DraftModel = ModelDrafterConfig | SpeculatorDrafterConfig

RANKS_PER_CORE = 16
"""Limit with `cluster.oversubscribe`: more ranks would take longer to start than a launch waits."""


class NoRoom(Exception):
    """No node has room for ranks whose node is gone, for now: one line."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of a machine or cluster: CPU cores by number, and a count of GPUs."""

    cores: tuple[int, ...]
    num_gpus: int = 0


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """One rank's place. `device` is "cpu" or "cuda:N"; `share` is its part of that device (1.0: all of it).

    `host` is the address of its node in a cluster, empty on this machine.
    """

    role: str
    rank: int
    size: int
    device: str
    cores: tuple[int, ...]
    num_threads: int
    share: float
    host: str = ""

    @property
    def identity(self) -> str:
        return f"{self.role}-{self.rank}"

    @property
    def kind(self) -> str:
        """The kind of the device: cuda or cpu."""
        return self.device.partition(":")[0]

    @property
    def device_key(self) -> tuple[str, str | tuple[int, ...]]:
        """The same for ranks that share a device: the host, and the GPU's name or the cores."""
        return self.host, self.cores if self.device == "cpu" else self.device

    @property
    def bound_to(self) -> tuple[int, ...]:
        """Cores of its CPU affinity: none on the nodes of a cluster, where only the number of free cores is known."""
        return () if self.host else self.cores

    def describe(self) -> str:
        cores = f" cores {','.join(map(str, self.bound_to))}" if self.bound_to else ""
        node = f"{self.host} " if self.host else ""
        shared = ", shared" if 0 < self.share < 1 else ""
        threads = f"{self.num_threads} thread{'s' * (self.num_threads != 1)}"
        return f"{self.identity}: {node}{self.device}{cores}, {threads}{shared}"


def lay_out(config: LaunchConfig, devices: Devices) -> list[RankPlacement]:
    """Target ranks, then draft ranks, level by level. ValueError where there are more ranks than devices."""
    roles = {"target": (config.target.tp, _kind(config.target.device, "target.device", devices))}
    for role, model in _draft_roles(config):
        roles[role] = (model.ranks, _kind(model.device, "drafter.device", devices))
    colocated = config.placement.name == "colocated"
    if colocated and len({kind for _, kind in roles.values()}) > 1:
        drafter = next(kind for role, (_, kind) in roles.items() if kind != roles["target"][1])
        raise ValueError(
            f"placement=colocated: the target on {roles['target'][1]} and the drafter on {drafter} have no device to "
            "share; give target.device and drafter.device one kind or use placement=separate"
        )
    parallel = [f"{role} with {size} ranks" for role, (size, kind) in roles.items() if size > 1 and kind == "cuda"]
    if colocated and len(parallel) > 1 and config.cluster.name == "inprocess":
        # threads of a process share the default stream of a GPU: where their roles' collectives are queued in another
        # order than on another GPU, each waits for the other without end
        raise ValueError(
            f"placement=colocated: {' and '.join(parallel)} would share GPUs as threads of one process, whose "
            "collectives may wait for each other without end; use cluster=local or placement=separate"
        )
    places, taken = [], {"cpu": 0, "cuda": 0}
    for role, (size, kind) in roles.items():
        sharers = [other for other, on in roles.values() if on == kind]
        total, share = (size, 1.0 / len(sharers)) if colocated else (sum(sharers), 1.0)
        places += _place(config, role, size, kind, 0 if colocated else taken[kind], total, share, devices)
        taken[kind] += size
    pipeline, drafter = config.pipeline.name, config.drafter
    speculates = drafter.name != "none" and pipeline != "plain" and not drafter.is_attached(pipeline)
    if speculates and len(roles) == 1 and not drafter.is_elsewhere:  # a lookup drafter needs no device of its own
        places.append(RankPlacement("draft", 0, 1, "cpu", (), 1, 0.0))
    return with_fewer_threads(config, places)


def place_alone(config: LaunchConfig, devices: Devices) -> RankPlacement:
    """The one rank of a drafter that has the machine to itself: a GPU, or all cores."""
    models = [model for _, model in _draft_roles(config)]
    kind = _kind(models[-1].device, "drafter.device", devices) if models else "cpu"
    (place,) = with_fewer_threads(config, _place(config, TOP, 1, kind, 0, 1, 1.0, devices))
    return place


def with_fewer_threads(config: LaunchConfig, places: Sequence[RankPlacement]) -> list[RankPlacement]:
    """`drafter.num_threads` limits the threads of a draft model's ranks."""
    most = {role: model.num_threads for role, model in _draft_roles(config) if model.num_threads}
    return [
        replace(place, num_threads=min(place.num_threads, most.get(place.role, place.num_threads))) for place in places
    ]


def models_of(config: LaunchConfig, role: str) -> list[DraftModel]:
    """The models that a role loads for drafting."""
    return cast("list[DraftModel]", list(config.drafter.models_of(role, config.pipeline.name)))


def _draft_roles(config: LaunchConfig) -> Iterator[tuple[str, DraftModel]]:
    """Every role of the drafter that has a model, and the last model of it."""
    if config.pipeline.name == "plain" or config.drafter.is_attached(config.pipeline.name):
        return
    for role in config.drafter.roles():
        if models := models_of(config, role):
            yield role, models[-1]


def _kind(wanted: str, field: str, devices: Devices) -> str:
    if wanted == "auto":
        return "cuda" if devices.num_gpus else "cpu"
    if wanted == "cuda" and not devices.num_gpus:
        raise ValueError(f"{field}=cuda: this machine offers no GPU; use {field}=cpu or auto")
    if wanted not in ("cpu", "cuda"):
        raise ValueError(f"{field}={wanted}: unknown device; use auto, cpu or cuda")
    return wanted


def _place(
    config: LaunchConfig, role: str, size: int, kind: str, taken: int, total: int, share: float, devices: Devices
) -> list[RankPlacement]:
    """Ranks `taken` .. `taken + size` of the `total` that divide the devices of this kind between them."""
    available = devices.num_gpus if kind == "cuda" else len(devices.cores)
    turns = RANKS_PER_CORE if kind == "cpu" and config.cluster.oversubscribe else 1
    if total > available * turns:
        field = "target.tp" if role == "target" else "drafter.ranks"
        needed = -(-total // turns)
        noun = "GPUs" if kind == "cuda" else "cores"
        remedies = ["lower it"] * (size > 1) + ["use placement=colocated"] * (total > size)
        remedies += ["set cluster.oversubscribe=true"] * (kind == "cpu" and turns == 1)
        raise ValueError(f"{field}: {total} ranks need {needed} {noun}, {available} here; {' or '.join(remedies)}")
    share /= -(-total // available)  # more ranks than cores take turns
    places = []
    for rank in range(size):
        cores = () if kind == "cuda" else slice_cores(devices.cores, taken + rank, total)
        device = f"cuda:{taken + rank}" if kind == "cuda" else "cpu"
        places.append(RankPlacement(role, rank, size, device, cores, len(cores) or 1, share))
    return places


def slice_cores(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """An even share of the cores; with more ranks than cores, one core each, in turn."""
    if count > len(cores):
        return (cores[index % len(cores)],)
    return tuple(cores[len(cores) * index // count : len(cores) * (index + 1) // count])
