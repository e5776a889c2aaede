"""The configuration record of `drafter=auto` and its checks. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths, LevelsPlacement
from actors.drafters.config import DrafterConfig, DraftSetup, PathResolver, TypedPart
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineName, VerifyRule
from actors.protocol.messages import SamplingKind
from actors.topology import TOP
from actors.verification.compatibility import DraftTrait
from parallel.ranges import Range, require

if TYPE_CHECKING:
    from actors.drafters.interface import Drafter


_CHOSEN_NEVER = frozenset({"none", "auto", "jacobi", "lookahead", "self", "speculator"})
"""Drafters that cannot be chosen: two learn only at the rows of their own drafts, in every round, one runs on the
target's ranks, and one reads the target's hidden states, which are sent to a drafter by itself only."""


@dataclass(frozen=True, slots=True)
class AutoDrafterConfig(DrafterConfig):
    """Several drafters, of which each request gets the one with the most tokens per second, chosen every round."""

    name: str = "auto"
    drafters: list[Any] = field(default_factory=lambda: ["suffix", "model"])
    """The drafters to choose among, each by its name or its keys, as `{name: model, path: DIR, num_draft_tokens: 4}`;
    a cascade by its levels, as `[ngram,model]`. Those without a model draft in every round, and are scored whether
    their drafts are used or not."""
    path: str = "pocket"
    """Checkpoint of a drafter `model` that is given by its name alone."""
    num_draft_tokens: Annotated[int, Range(0, zero="the most of its drafters")] = 0
    """Draft tokens a round, at most; 0 = the most of its drafters."""

    def __hash__(self) -> int:
        return hash(repr(self))  # the unchecked record holds lists, which have no hash

    @property
    def paces_ms(self) -> list[Any]:
        return [pace for one in self.drafters for pace in one.paces_ms]

    @property
    def is_chain(self) -> bool:
        return all(one.is_chain for one in self.drafters)

    @property
    def chooses_lengths(self) -> bool:
        return True

    @property
    def draft_models(self) -> list[ModelDrafterConfig]:
        """The models of all drafters, those of a cascade's levels among them."""
        inner = [part for one in self.drafters for part in (one.levels if _is_cascade(one) else [one])]
        return [one for one in inner if isinstance(one, ModelDrafterConfig)]

    @property
    def target_top_k(self) -> int:
        return max(one.target_top_k for one in self.drafters)

    @property
    def reads_prompts(self) -> bool:
        return any(one.reads_prompts for one in self.drafters)

    @property
    def member_names(self) -> tuple[str, ...]:
        """Also in reports: each drafter's own name, numbered if it is there twice."""
        names = [one.name for one in self.drafters]
        return tuple(name if names.count(name) == 1 else f"{i}-{name}" for i, name in enumerate(names))

    def with_typed_parts(self, typed: TypedPart, where: str) -> AutoDrafterConfig:
        """One that is a list is a cascade of these levels; `model` is that of `path`."""
        drafters = []
        for i, entry in enumerate(self.drafters):
            keys = {"name": "cascade", "levels": entry} if isinstance(entry, list) else entry
            if keys == "model":
                keys = {"name": "model", "path": self.path}
            drafters.append(typed(keys, f"{where}.drafters[{i}]", _CHOSEN_NEVER, "drafter"))
        if not drafters:
            raise ValueError(f"{where}.drafters={self.drafters}: must name at least one, as [suffix,model]")
        longest = max(one.num_draft_tokens for one in drafters)
        return replace(self, drafters=tuple(drafters), num_draft_tokens=self.num_draft_tokens or longest)

    def check_fields(self, where: str) -> None:
        for i, one in enumerate(self.drafters):
            one.check(f"{where}.drafters[{i}]")
            if _is_cascade(one):
                remedy = "measures rounds that other drafters take part in; leave it at fixed"
                require(one.lengths is LevelLengths.fixed, f"{where}.drafters[{i}].lengths", one.lengths, remedy)
                remedy = "runs the target's own layers, on its ranks, which drafter=auto does not share; drop it"
                place, last = f"{where}.drafters[{i}].levels[{len(one.levels) - 1}]", one.levels[-1]
                require(not one.is_attached(PipelineName.sync), place, last.name, remedy)
                remedy = "has no ranks of its own here; leave it at together"
                together = one.placement is LevelsPlacement.together
                require(together, f"{where}.drafters[{i}].placement", one.placement, remedy)
        models = self.draft_models
        for model in models:
            alike = (model.ranks, model.device) == (models[-1].ranks, models[-1].device)
            remedy = "must be the same for all models, which share their ranks"
            require(alike, f"{where}.drafters: ranks and device", f"{model.ranks}, {model.device}", remedy)

    def check_with(self, rule: VerifyRule, pipeline: PipelineName, where: str = "drafter") -> None:
        remedy = (
            f"measures drafting and verifying in turn and prepares nothing ahead, so pipeline={pipeline} would only "
            "slow it; use pipeline=sync"
        )
        require(pipeline in (PipelineName.sync, PipelineName.plain), where, self.name, remedy)
        for i, one in enumerate(self.drafters):
            one.check_with(rule, pipeline, f"{where}.drafters[{i}]")

    def with_paths(self, resolve: PathResolver, where: str = "drafter") -> DrafterConfig:
        drafters = [one.with_paths(resolve, f"{where}.drafters[{i}]") for i, one in enumerate(self.drafters)]
        return replace(self, drafters=tuple(drafters))

    def check_checkpoints(self, where: str = "drafter") -> None:
        for i, one in enumerate(self.drafters):
            one.check_checkpoints(f"{where}.drafters[{i}]")

    def models_of(self, role: str, pipeline: str) -> Sequence[DrafterConfig]:
        return self.draft_models if role == TOP else []

    def models(self) -> list[str]:
        return [path for one in self.drafters for path in one.models()]

    def translated_models(self) -> list[str]:
        return [path for one in self.drafters for path in one.translated_models()]

    def sampling_kinds(self, rule: VerifyRule, pipeline: PipelineName) -> set[SamplingKind]:
        return {kind for one in self.drafters for kind in one.sampling_kinds(rule, pipeline)}

    def draft_traits(self, rule: VerifyRule, pipeline: PipelineName) -> set[DraftTrait]:
        return {trait for one in self.drafters for trait in one.draft_traits(rule, pipeline)}

    def build(self, setup: DraftSetup) -> tuple[Drafter, dict[str, object]]:
        from actors.drafters.auto.drafter import build_auto

        return build_auto(self, setup)


def _is_cascade(record: DrafterConfig) -> bool:
    return isinstance(record, CascadeDrafterConfig)
