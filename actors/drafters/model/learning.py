"""A drafter with a learner beside it, as its record says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.online.drafter import OnlineDrafter
from actors.drafters.online.learner import OnlineLearner
from parallel.model.layers.weight import Weight
from parallel.training.adapted import AdaptedModel

if TYPE_CHECKING:
    from actors.drafters.model.config import LearningDrafterConfig


def learning(
    drafter: ModelDrafter, served: Sequence[Weight], model: AdaptedModel, config: LearningDrafterConfig
) -> OnlineDrafter:
    """`drafter`, whose weights `served` are those of `model`; ValueError, one line, for a saved state that is none of
    this model."""
    learner = OnlineLearner(
        model, rate=config.online_rate, strength=config.online_strength, num_positions=config.online_memory
    )
    state = Path(config.online_state) if config.online_state else None
    if state is not None and state.exists():
        learner.restore(state)
    return OnlineDrafter(drafter, drafter.runner, served, learner, config.online_budget, state)
