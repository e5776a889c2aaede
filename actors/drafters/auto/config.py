"""The configuration record of `drafter=auto` and its checks. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from actors.drafters.cascade.config import CascadeDrafterConfig, LevelLengths, LevelsPlacement
from actors.drafters.config import (
    PARTS,
    DrafterConfig,
    DraftSetup,
    PathResolver,
    PlacedDrafterConfig,
    Placement,
    TypedPart,
    placed_at,
)
from actors.drafters.model.config import LEARNS_ALONE, ModelDrafterConfig
from actors.options import PipelineName, VerifyRule
from actors.protocol.messages import SamplingKind
from actors.topology import TOP
from parallel.ranges import Range, require
from parallel.speculators.config import STREAMS

if TYPE_CHECKING:
    from actors.drafters.interface import Drafter
    from parallel.runtime.decoder_runner import DecoderRunner
    from parallel.speculators.fusing import TapFuser

_NOT_INSIDE = frozenset({"none", "auto", "routed"})


@dataclass(frozen=True, slots=True)
class AutoDrafterConfig(PlacedDrafterConfig):
    """Several drafters in one place, of which each request gets the one that it names, or that with the most tokens per
    second, chosen every round."""

    name: str = "auto"
    drafters: list[Any] = field(default_factory=lambda: ["suffix", "model"])
    """The drafters, each by its name or its keys, as `{name: model, path: DIR, num_draft_tokens: 4}`; a cascade by its
    levels, as `[ngram,model]`. Lookups draft in every round, and are scored whether their drafts are used or not."""
    path: str = "pocket"
    """Checkpoint of a drafter `model` that is given by its name alone."""
    num_draft_tokens: Annotated[int, Range(0, zero="the most of its drafters")] = 0
    """Draft tokens a round, at most; 0 = the most of its drafters."""
    placement: Placement = Placement.auto
    """attached: all of them on the target's ranks, for pipeline=sync. separate: in a role of their own. auto: attached
    with pipeline=sync, unless a key of one of them asks for ranks of its own; else separate."""
    chooses_lengths = True

    def __hash__(self) -> int:
        return hash(repr(self))  # the unchecked record holds lists, which have no hash

    def measured(self, facts: Mapping[str, Any]) -> Self:
        parts = facts.get(PARTS, {})
        return replace(self, drafters=tuple(one.measured(parts.get(str(i), {})) for i, one in enumerate(self.drafters)))

    def parts(self, where: str = "") -> list[tuple[str, Any]]:
        return [(f"{where}.drafters[{i}]", one) for i, one in enumerate(self.drafters)]

    @property
    def is_chain(self) -> bool:
        return all(one.is_chain for one in self.drafters)

    @property
    def runs_passes(self) -> bool:
        return any(one.runs_passes for one in self.drafters)

    @property
    def scores_drafts(self) -> bool:
        return any(one.scores_drafts for one in self.drafters)

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

    @property
    def copying_names(self) -> tuple[str, ...]:
        named = zip(self.member_names, self.drafters, strict=True)
        return tuple(name for name, one in named if one.copying_names)

    # --- where they run, and what they read of the target -------------------------------------------------------------

    @property
    def needs_own_ranks(self) -> bool:
        return any(isinstance(one, PlacedDrafterConfig) and one.needs_own_ranks for one in self.drafters)

    def placed(self, pipeline: str) -> list[Any]:
        """The drafters, each in the place of all."""
        chosen = Placement.attached if self.is_attached(pipeline) else Placement.separate
        return placed_at(chosen if pipeline == PipelineName.sync else self.placement, self.drafters)

    @property
    def _readers(self) -> list[DrafterConfig]:
        """Those that read hidden states."""
        return [one for one in self.drafters if one.reads_features]

    @property
    def reads_features(self) -> bool:
        return bool(self._readers)

    def taps(self, target_layers: int) -> tuple[int, ...]:
        return tuple(tap for one in self._readers for tap in one.taps(target_layers))

    def open_fuser(self, target_layers: int, device: str) -> TapFuser | None:
        (reader,) = self._readers  # checked: others read them on the target's ranks, as they are
        return reader.open_fuser(target_layers, device)

    def on_target(self, target: DecoderRunner) -> DecoderRunner:
        for one in self.drafters:
            target = one.on_target(target)
        return target

    def models_of(self, role: str, pipeline: str) -> Sequence[DrafterConfig]:
        own = "target" if self.is_attached(pipeline) else TOP
        found: list[DrafterConfig] = []
        for one in self.placed(pipeline) if role == own else []:
            found += one.models_of(TOP if _is_cascade(one) else own, pipeline)
        return found

    # --- parts and checks ---------------------------------------------------------------------------------------------

    def with_typed_parts(self, typed: TypedPart, where: str) -> AutoDrafterConfig:
        """One that is a list is a cascade of these levels; `model` is that of `path`."""
        drafters = []
        for i, entry in enumerate(self.drafters):
            keys = {"name": "cascade", "levels": entry} if isinstance(entry, list) else entry
            if keys == "model":
                keys = {"name": "model", "path": self.path}
            drafters.append(typed(keys, f"{where}.drafters[{i}]", _NOT_INSIDE, "drafter"))
        if not drafters:
            raise ValueError(f"{where}.drafters={self.drafters}: must name at least one, as [suffix,model]")
        longest = max(one.num_draft_tokens for one in drafters)
        return replace(self, drafters=tuple(drafters), num_draft_tokens=self.num_draft_tokens or longest)

    def check_fields(self, where: str) -> None:
        for key, one in self.parts(where):
            one.check(key)
            self.check_member(one, key)
            if _is_cascade(one):
                remedy = "measures rounds that other drafters take part in; leave it at fixed"
                require(one.lengths is LevelLengths.fixed, f"{key}.lengths", one.lengths, remedy)
                remedy = "has no ranks of its own here; leave it at together"
                together = one.placement is LevelsPlacement.together
                require(together, f"{key}.placement", one.placement, remedy)
            elif isinstance(one, PlacedDrafterConfig):
                remedy = f"is one for all of them; drop it, or give {where}.placement"
                require(one.placement is Placement.auto, f"{key}.placement", one.placement, remedy)
        models = self.draft_models
        for model in models:
            alike = (model.ranks, model.device) == (models[-1].ranks, models[-1].device)
            remedy = "must be the same for all models, which share their ranks"
            require(alike, f"{where}.drafters: ranks and device", f"{model.ranks}, {model.device}", remedy)

    def check_member(self, one: DrafterConfig, where: str) -> None:
        """ValueError, one line, for a drafter that cannot be one of several."""
        require(not getattr(one, "online", False), f"{where}.online", True, LEARNS_ALONE)

    def check_with(self, rule: VerifyRule, pipeline: PipelineName, where: str = "drafter") -> None:
        super(AutoDrafterConfig, self).check_with(rule, pipeline, where)
        bridged, num_readers = self.is_bridged(pipeline), len(self._readers)
        remedy = "hidden states are sent to one drafter only, and several read them; use attached, with pipeline=sync"
        require(not bridged or num_readers == 1, f"{where}.placement", self.placement, remedy)
        for i, one in enumerate(self.placed(pipeline)):
            one.check_fields(f"{where}.drafters[{i}]")
            one.check_with(rule, pipeline, f"{where}.drafters[{i}]")

    def with_paths(self, resolve: PathResolver, where: str = "drafter") -> DrafterConfig:
        placed = [
            one.with_paths(resolve, where if one.models() == [self.path] else f"{where}.drafters[{i}]")
            for i, one in enumerate(self.placed(resolve.pipeline))
        ]
        found = placed_at(Placement.auto, placed)
        config = replace(self, drafters=tuple(found))
        streams = len(config._readers) > 1 and STREAMS in config.taps(resolve.target_layers)
        remedy = "one of them drafts with streams in the target's passes, which then give no other hidden states"
        require(not streams, f"{where}.drafters", self.member_names, f"{remedy}; drop it or the other speculators")
        return config

    def sampling_kinds(self, rule: VerifyRule, pipeline: PipelineName) -> set[SamplingKind]:
        return {kind for one in self.drafters for kind in one.sampling_kinds(rule, pipeline)}

    def build(self, setup: DraftSetup) -> tuple[Drafter, dict[str, object]]:
        from actors.drafters.auto.drafter import build_auto

        return build_auto(self, setup)


def _is_cascade(record: DrafterConfig) -> bool:
    return isinstance(record, CascadeDrafterConfig)
