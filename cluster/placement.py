"""Which rank runs where: a pure function from the user's choice and the devices at hand to one line per rank.

Knows counts of devices, not what runs on them. Ray and the in-process backend both follow the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config import LaunchConfig


@dataclass(frozen=True, slots=True)
class Devices:
    """What a machine or cluster offers: CPU cores by number, and a count of GPUs."""

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

    def describe(self) -> str:
        cores = f" cores {','.join(map(str, self.cores))}" if self.cores else ""
        node = f"{self.host} " if self.host else ""
        shared = ", shared" if 0 < self.share < 1 else ""
        threads = f"{self.num_threads} thread{'s' * (self.num_threads != 1)}"
        return f"{self.identity}: {node}{self.device}{cores}, {threads}{shared}"


def lay_out(config: LaunchConfig, devices: Devices) -> list[RankPlacement]:
    """Target ranks, then draft ranks. ValueError where there are more ranks than devices."""
    num_target, num_draft = config.target.tp, getattr(config.drafter, "ranks", 1)
    if config.drafter.name == "none" or config.pipeline.name == "plain":
        num_draft = 0
    on_device = num_draft if hasattr(config.drafter, "ranks") else 0  # a lookup drafter needs no device of its own
    colocated = config.placement.name == "colocated"
    kind = _kind(config.target.device, "target.device", devices)
    draft_kind = _kind(config.drafter.device, "drafter.device", devices) if on_device else "cpu"
    same_kind = bool(on_device) and kind == draft_kind
    if on_device and colocated and not same_kind:
        raise ValueError(
            f"placement=colocated: the target on {kind} and the drafter on {draft_kind} have no device to share; "
            "give target.device and drafter.device one kind or use placement=separate"
        )
    share = 0.5 if same_kind and colocated else 1.0
    rivals = num_target + on_device if same_kind and not colocated else 0
    places = _place(config, "target", num_target, kind, 0, rivals or num_target, share, devices)
    if on_device:
        places += _place(
            config, "draft", on_device, draft_kind, num_target if rivals else 0, rivals or on_device, share, devices
        )
    if num_draft and not on_device:
        places.append(RankPlacement("draft", 0, 1, "cpu", (), 1, 0.0))
    return places


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
    if total > available and not (kind == "cpu" and config.cluster.oversubscribe):
        field = "target.tp" if role == "target" else "drafter.ranks"
        noun = "GPUs" if kind == "cuda" else "cores"
        remedies = ["lower it"] * (size > 1) + ["use placement=colocated"] * (total > size)
        remedies += ["set cluster.oversubscribe=true"] * (kind == "cpu")
        raise ValueError(f"{field}: {total} ranks need {total} {noun}, {available} here; {' or '.join(remedies)}")
    share /= -(-total // available)  # more ranks than cores take turns
    places = []
    for rank in range(size):
        if kind == "cuda":
            places.append(RankPlacement(role, rank, size, f"cuda:{taken + rank}", (), 1, share))
        else:
            cores = _slice(devices.cores, taken + rank, total)
            places.append(RankPlacement(role, rank, size, "cpu", cores, len(cores), share))
    return places


def _slice(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """An even share of the cores; with more ranks than cores, ranks take turns on them."""
    if count > len(cores):
        return (cores[index % len(cores)],)
    return tuple(cores[len(cores) * index // count : len(cores) * (index + 1) // count])
