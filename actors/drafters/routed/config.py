"""The configuration record of `drafter=routed`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.config import DrafterConfig, DraftSetup
from actors.drafters.model.config import ModelDrafterConfig
from parallel.ranges import require

if TYPE_CHECKING:
    from actors.drafters.interface import Drafter


@dataclass(frozen=True, slots=True)
class RoutedDrafterConfig(AutoDrafterConfig):
    """Several draft models, of which each request gets one, by its prompt or by name; each may learn from its own."""

    name: str = "routed"
    drafters: list[Any] = field(default_factory=lambda: [{"name": "model", "online": True} for _ in range(2)])
    """The draft models, `model` or its keys, as {name: model, online: true}: two or more. Prompts that are alike go to
    one of them, so they should begin alike; of models that differ a request names the one that it wants."""
    chooses_lengths = False

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def learns_later(self) -> bool:
        return all(one.learns_later for one in self.drafters if one.target_top_k)

    def check_fields(self, where: str) -> None:
        require(len(self.drafters) > 1, f"{where}.drafters", len(self.drafters), "must be two or more models")
        super(RoutedDrafterConfig, self).check_fields(where)

    def check_member(self, one: DrafterConfig, where: str) -> None:
        is_model = isinstance(one, ModelDrafterConfig)
        require(is_model, f"{where}.name", one.name, "is not routed to; give models, or use drafter=auto")
        state = one.online_state if isinstance(one, ModelDrafterConfig) else ""
        remedy = "is of one model, and which prompts were its own is not kept; drop it"
        require(not state, f"{where}.online_state", state, remedy)

    def build(self, setup: DraftSetup) -> tuple[Drafter, dict[str, object]]:
        from actors.drafters.routed.drafter import build_routed

        return build_routed(self, setup)
