"""What a rank needs before it starts, as plain values that are made without loading PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from actors.drafters.config import DrafterConfig, DraftSetup
from actors.options import SchedulerConfig, TargetConfig, VerifyConfig
from actors.protocol.membership import Weights, identity_of
from actors.transport.keys import LinkKey

if TYPE_CHECKING:
    from parallel.comm.group import Group
    from parallel.runtime.kv_sizing import DeviceShare


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank."""

    role: str
    rank: int
    size: int
    """Ranks of the role."""
    device: str
    num_threads: int
    cores: tuple[int, ...]
    """Cores that its threads may use; empty leaves the affinity unchanged."""
    hub_address: str
    host: str
    eos_token_ids: tuple[int, ...]
    target: TargetConfig
    drafter: DrafterConfig
    verify: VerifyConfig
    pipeline: str
    scheduler: SchedulerConfig
    adaptive: bool = False
    incarnation: int = 0
    neighbour_bytes: int = 0
    """Weights of the other ranks on the same GPU."""
    memory_part: float = 1.0
    """This rank's part of what the weights of all ranks on its GPU leave."""
    key: LinkKey | None = None
    """The key with which the rank connects to the hub."""
    folder: str = ""
    """Folder of this machine where the hub listens too, if it does."""
    is_thread: bool = False
    """It is a thread of the coordinator's process, which works on a record where that is sent."""
    weights: Weights | None = None
    """Another checkpoint of the target's shape, whose weights it serves in place of those of `target.path`."""

    @property
    def identity(self) -> str:
        return identity_of(self.role, self.rank)

    @property
    def served(self) -> Weights:
        """Path and version of the target's weights."""
        return self.weights or Weights(self.target.path)

    @property
    def device_share(self) -> DeviceShare | None:
        """What it shares its device with; None if it has it alone."""
        if self.memory_part == 1 and not self.neighbour_bytes:
            return None
        from parallel.runtime.kv_sizing import DeviceShare  # loads the model's modules

        return DeviceShare(self.neighbour_bytes, self.memory_part)

    def draft_setup(self, group: Group) -> DraftSetup:
        """What a drafter on this rank is built from."""
        return DraftSetup(
            self.verify,
            self.pipeline,
            self.scheduler,
            group,
            self.device,
            self.eos_token_ids,
            target=self.target,
            sharing=self.device_share,
            adaptive=self.adaptive,
        )

    def successor(self, incarnation: int, facts: Mapping[str, Any]) -> RankSpec:
        """The same rank in a new process.

        What the last process measured together with its peers is kept, because they keep it and do not measure again.
        """
        if self.role != "target":
            return replace(self, incarnation=incarnation, drafter=self.drafter.measured(facts))
        target = replace(self.target, kv_slots=facts.get("kv_slots", self.target.kv_slots))
        return replace(self, incarnation=incarnation, target=target)
