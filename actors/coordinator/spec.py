"""What a coordinator needs before it starts, as plain values that are made without loading it."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.options import SchedulerConfig
from actors.protocol.membership import Weights
from actors.topology import role_name, seat_role


@dataclass(frozen=True, slots=True)
class CoordinatorSpec:
    """What a coordinator needs before it starts; plain values, so that it can be sent to any process."""

    pipeline: str
    num_draft_tokens: int
    target_ranks: int
    draft_ranks: int
    eos_token_ids: tuple[int, ...]
    limits: SchedulerConfig = field(default_factory=SchedulerConfig)
    level_ranks: tuple[int, ...] = ()
    """Ranks of each level of a cascade below the drafter that has ranks of its own: draft2, draft3, ..."""
    silence_s: float = 0.0
    """Seconds without a heartbeat after which a rank is taken to hang; 0: never."""
    incarnation: int = 0
    adaptive: bool = False
    min_draft_tokens: int = 0
    chooses_lengths: bool = False
    """The drafter decides how many of the ordered tokens it drafts."""
    scores_drafts: bool = False
    """The drafter can draft without a pass of a model, to compare with text that is decoded plainly."""
    runs_passes: bool = False
    """Some of its drafts take passes of a model."""
    drafters: tuple[str, ...] | None = None
    """Names that a request may choose from; None: any."""
    attached: bool = False
    """The drafter runs on the target's ranks."""
    bridged: bool = False
    """The drafter is sent the target's hidden states."""
    local_drafter: str = "none"
    """The lookup beside the coordinator; with one, drafts of the drafter are never waited for."""
    weights: Weights | None = None
    """What the target serves at the start of this incarnation; None: what its ranks were started with."""
    lent_silence_s: float = 0.0
    """Above 0: the drafter's rank is one that a pool lends. It is not awaited at the start, and lost after so many
    seconds without a heartbeat; no process of the engine is ended then."""
    num_seats: int = 1
    """Ranks that pools lend at a time, each a role of its own."""

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks of each role."""
        if self.num_seats > 1:
            return {"target": self.target_ranks, **dict.fromkeys(map(seat_role, range(self.num_seats)), 1)}
        levels = {role_name(place): size for place, size in enumerate((self.draft_ranks, *self.level_ranks)) if size}
        return {"target": self.target_ranks, **levels}

    @property
    def lead_roles(self) -> tuple[str, ...]:
        """Roles that the state machine works with; levels of a cascade below the drafter work for it."""
        return ("target", *map(seat_role, range(self.num_seats)))
