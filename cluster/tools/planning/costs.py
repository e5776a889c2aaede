"""The costs that predictions use: seconds of a pass by role and ranks, seconds of a message, acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.tools.planning.layouts import Shape
from cluster.tools.simulation import PassCost, power_law


@dataclass(frozen=True, slots=True)
class RankCores:
    """CPU cores of each rank of a role; 0 where that does not matter."""

    target: int = 0
    draft: int = 0


@dataclass(frozen=True, slots=True)
class TargetCost:
    """Passes of the target on so many ranks."""

    ranks: int
    passes: PassCost
    cores: int = 0
    """CPU cores of each rank; 0 fits any."""
    beside: bool | None = None
    """Measured while the drafter computed too (true) or not (false); None fits both."""
    shape: Shape | None = None
    """The drafter it was measured with; None: measured alone, which fits any."""


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Passes of the draft model in one shape."""

    shape: Shape
    passes: PassCost
    exact: PassCost | None = None
    """Passes over committed text, where they differ from the others: layer-parallel ones calibrate the KV."""
    acceptance: tuple[float, ...] = ()
    """Acceptance by distance from the committed text; empty: that of the cluster."""
    cores: int = 0
    beside: bool | None = None
    target_ranks: int = 0
    """Ranks of the target it was measured with; 0 fits any."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """The inputs of a prediction. Times in seconds; `link_s` is one way."""

    num_devices: int
    target: tuple[TargetCost, ...]
    drafter: tuple[DraftCost, ...]
    link_s: float = 0.0
    coordinator_s: float = 0.0
    acceptance: tuple[float, ...] = (0.8,)
    runners_up: tuple[float, ...] = field(default_factory=lambda: power_law(1.0))

    def of_target(self, ranks: int, shape: Shape | None, cores: int, *, beside: bool) -> TargetCost | None:
        """Measured with this drafter if there is such a cost, else alone; None if unknown."""
        fitting = [cost for cost in self.target if cost.ranks == ranks and _fits(cost, cores, beside)]
        return next((cost for wanted in (shape, None) for cost in fitting if cost.shape == wanted), None)

    def of_drafter(self, shape: Shape, target_ranks: int, cores: int, *, beside: bool) -> DraftCost | None:
        """None if unknown."""
        fitting = [cost for cost in self.drafter if cost.shape == shape and _fits(cost, cores, beside)]
        return next((cost for cost in fitting if cost.target_ranks in (0, target_ranks)), None)


def _fits(cost: TargetCost | DraftCost, cores: int, beside: bool) -> bool:
    return (not cost.cores or not cores or cost.cores == cores) and cost.beside in (None, beside)
