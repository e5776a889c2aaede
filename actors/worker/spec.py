"""What a rank is told before it starts: plain values, which whoever starts it can make without loading PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from actors.drafters.config import DrafterConfig
from actors.options import SchedulerConfig, TargetConfig, VerifyConfig
from actors.protocol.membership import identity_of


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank's orders. `cores` empty leaves the affinity alone; `size` is the number of ranks of the role."""

    role: str
    rank: int
    size: int
    device: str
    num_threads: int
    cores: tuple[int, ...]
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

    @property
    def identity(self) -> str:
        return identity_of(self.role, self.rank)
