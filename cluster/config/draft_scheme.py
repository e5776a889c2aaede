"""How the tokens of the chosen drafter come about, as far as a verification rule must know. Loads no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.drafters.draft_ahead.tree import AHEAD
from actors.options import DrafterConfig, ModelDrafterConfig, NoDrafterConfig, Strategy, VerifyRule
from actors.protocol.messages import SamplingKind
from actors.topology import CascadeDrafterConfig, LevelLengths, LevelsPlacement

if TYPE_CHECKING:
    from cluster.config.schema import LaunchConfig


def sampling_kinds_of(config: LaunchConfig) -> set[SamplingKind]:
    """How the tokens that the target sees would be drawn for a ratio test."""
    drafter = config.drafter
    if isinstance(drafter, NoDrafterConfig):
        return set()
    if isinstance(drafter, CascadeDrafterConfig):
        return {SamplingKind.IID, first_draw(config)} if _hands_through(drafter) else {SamplingKind.IID}
    return {first_draw(config)}


def _hands_through(cascade: CascadeDrafterConfig) -> bool:
    """Whether tokens of the first level may reach the target as they are: in tails of tails, past levels left out."""
    left_out = cascade.lengths is LevelLengths.auto or not any(level.num_draft_tokens for level in cascade.levels[1:])
    return left_out or (bool(cascade.tails) and all(cascade.tails[1:]))


def first_draw(config: LaunchConfig) -> SamplingKind:
    """How the drafter draws, or the first level of a cascade."""
    match drafts_first(config):
        case ModelDrafterConfig(strategy=Strategy.chain | Strategy.tree), False:
            return SamplingKind.IID if config.verify.rule is VerifyRule.kseq else SamplingKind.WITHOUT_REPLACEMENT
    return SamplingKind.DETERMINISTIC


def drafts_first(config: LaunchConfig) -> tuple[DrafterConfig, bool]:
    """The drafter, or the first level of a cascade, and whether it works ahead of its orders."""
    drafter, ahead = config.drafter, config.pipeline.name in AHEAD
    if isinstance(drafter, CascadeDrafterConfig):
        return drafter.levels[0], ahead and drafter.placement is LevelsPlacement.separate
    return drafter, ahead
