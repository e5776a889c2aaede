"""The configuration record of `drafter=cascade`, its choices and its checks. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Self

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
from actors.drafters.model.config import LEARNS_ALONE, Draws, ModelDrafterConfig, Strategy, Translation
from actors.drafters.self_speculation.config import Search, SelfDrafterConfig
from actors.options import INDEPENDENT_ONLY, PipelineName, VerifyRule
from actors.protocol.messages import SamplingKind
from actors.topology import TOP, role_name
from parallel.ranges import Range, check_ranges, require

if TYPE_CHECKING:
    from actors.drafters.interface import Drafter


class LevelLengths(StrEnum):
    """How the number of tokens that each level of a cascade passes up is chosen."""

    fixed = "fixed"
    auto = "auto"


class LevelsPlacement(StrEnum):
    """Whether the levels of a cascade share their ranks."""

    together = "together"
    separate = "separate"


_NO_LEVELS = frozenset({"none", "auto", "cascade", "speculator"})


@dataclass(frozen=True, slots=True)
class CascadeDrafterConfig(DrafterConfig):
    """Drafters that draft for each other: every level verifies the drafts of the one before it."""

    name: str = "cascade"
    levels: list[Any] = field(default_factory=lambda: [{"name": "ngram", "num_draft_tokens": 3}, "model"])
    """The cheapest first; each a drafter's name or its keys, as `{name: model, path: DIR, num_draft_tokens: 4}`. The
    first may be any drafter but a speculator, the others are models; the last may be `self`, and the others are then on
    the target's ranks too.
    `num_draft_tokens`: tokens that a level passes to the next at a time; 0 = it forwards the drafts of the level before
    it, as if it were not there."""
    num_draft_tokens: Annotated[int, Range(0, zero="those of the last level, its tail and merge")] = 0
    """Draft tokens a round, at most; 0 = those of the last level, its tail and `merge`."""
    tails: Annotated[list[int], Range(0)] = field(default_factory=list)
    """Unverified tokens, a number for each level, that the level before it appends to the level's own; empty = none."""
    lengths: LevelLengths = LevelLengths.fixed
    """fixed: `num_draft_tokens` as given; auto: at most so many, and 0 of a level that does not pay, be it the last:
    the best of all cascades that can be made of the levels, by measured costs and acceptance. auto needs
    drafter.placement=together, pipeline=sync, and neither tails nor merge."""
    merge: Annotated[int, Range(0, zero="nothing is merged")] = 0
    """Draft tokens of the last level but one that are added beside the last level's, where the two differ."""
    placement: LevelsPlacement = LevelsPlacement.together
    """together: all levels on the last one's ranks, in turn; separate: each model on ranks of its own, so that, in an
    asynchronous pipeline, it drafts while the next one verifies."""
    runs_passes = True

    def __hash__(self) -> int:
        return hash(repr(self))  # the unchecked record holds lists, which have no hash

    def measured(self, facts: Mapping[str, Any]) -> Self:
        parts = facts.get(PARTS, {})
        return replace(self, levels=tuple(one.measured(parts.get(str(i), {})) for i, one in enumerate(self.levels)))

    def parts(self, where: str = "") -> list[tuple[str, Any]]:
        return [(f"{where}.levels[{i}]", one) for i, one in enumerate(self.levels)]

    @property
    def ranks(self) -> int:
        """Ranks that share the models."""
        return self.levels[-1].ranks

    @property
    def device(self) -> str:
        """Device of the last level."""
        return self.levels[-1].device

    def tail(self, level: int) -> int:
        """Unverified tokens that level number `level` passes on after its own."""
        return self.tails[level] if self.tails else 0

    def width(self, level: int) -> int:
        """Nodes beside each other in the tree that a level above the first passes up; 1 for a chain."""
        one = self.levels[level]
        return one.width if level and one.strategy is Strategy.tree else 1

    def level_name(self, level: int) -> str:
        """The name of level number `level` in reports."""
        return f"{level}-{self.levels[level].name}"

    def roles(self) -> dict[str, range]:
        """The roles of the levels. With `placement=separate` the last one runs the first levels: a level without a
        model is on the ranks of the level after it."""
        count = len(self.levels)
        if self.placement is LevelsPlacement.together:
            return {TOP: range(count)}
        ends = [i + 1 for i, level in enumerate(self.levels) if level.models()]
        starts = [0, *ends[:-1]]
        spans = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        return {role_name(depth): span for depth, span in enumerate(reversed(spans))}

    def with_typed_parts(self, typed: TypedPart, where: str) -> CascadeDrafterConfig:
        levels = [typed(entry, f"{where}.levels[{i}]", _NO_LEVELS, "level") for i, entry in enumerate(self.levels)]
        if len(levels) < 2:
            remedy = "must be at least two, the cheapest first, as [ngram,model]"
            raise ValueError(f"{where}.levels={self.levels}: {remedy}")
        if self.tails and len(self.tails) != len(levels):
            raise ValueError(f"{where}.tails={self.tails}: give one for each of the {len(levels)} levels, or none")
        last = next((level.num_draft_tokens for level in reversed(levels) if level.num_draft_tokens), 0)
        length = self.num_draft_tokens or last + self.tail(len(levels) - 1) + self.merge
        return replace(self, levels=tuple(levels), tails=tuple(self.tails), num_draft_tokens=length)

    def check_fields(self, where: str) -> None:
        for key, level in self.parts(where):
            check_ranges(level, key, except_for="num_draft_tokens")  # which may be 0 here
            level.check_fields(key)
            require(not getattr(level, "online", False), f"{key}.online", True, LEARNS_ALONE)
        for i, level in enumerate(self.levels[1:], 1):
            remedy = "only the first level may lack a model; put it there"
            require(
                isinstance(level, ModelDrafterConfig | SelfDrafterConfig), f"{where}.levels[{i}]", level.name, remedy
            )
            if isinstance(level, ModelDrafterConfig):
                remedy = "drafts text and verifies none; put it first or use translate=intersection"
                spells = level.translate is Translation.strings
                require(not spells, f"{where}.levels[{i}].translate", level.translate, remedy)
            remedy = "a level that verifies passes up a chain, or the runners-up beside it; use chain or tree"
            shaped = level.strategy in (Strategy.chain, Strategy.tree)
            require(shaped, f"{where}.levels[{i}].strategy", level.strategy, remedy)
            remedy = "a level that verifies has `width` nodes beside each other at every depth; drop it"
            require(not level.branching, f"{where}.levels[{i}].branching", level.branching, remedy)
            remedy = "a level that verifies draws as the rule needs; drop it"
            require(level.draws is Draws.auto, f"{where}.levels[{i}].draws", level.draws, remedy)
            remedy = "passes up a tree, which cannot have a tail; drop drafter.tails of that level or its strategy"
            chained = self.width(i) == 1
            require(chained or not self.tail(i), f"{where}.levels[{i}].strategy", level.strategy, remedy)
        self._check_self(where)
        learns, forwards = self.levels[0].target_top_k > 0, self.levels[1].num_draft_tokens == 0
        remedy = "learns from level 1, which forwards drafts without a pass; let that pass up at least 1"
        require(not (learns and forwards), f"{where}.levels[0]", self.levels[0].name, remedy)
        for i, tail in enumerate(self.tails):
            remedy = "must be 0 or above, and 0 for the first level, which has no level before it"
            require(i > 0 or tail == 0, f"{where}.tails[{i}]", tail, remedy)
        for i, level in enumerate(self.levels[:-1]):
            on_target = isinstance(self.levels[-1], SelfDrafterConfig)
            together = self.placement is LevelsPlacement.together and not on_target
            if isinstance(level, ModelDrafterConfig) and together:
                alike = (level.ranks, level.device) in ((1, "auto"), (self.ranks, self.device))
                remedy = "needs the last level's ranks and device; use drafter.placement=separate for its own"
                require(alike, f"{where}.levels[{i}]", level.name, remedy)

    def _check_self(self, where: str) -> None:
        """A level that is the target with fewer layers takes the whole cascade to the target's ranks."""
        for i, level in enumerate(self.levels):
            if not isinstance(level, SelfDrafterConfig):
                continue
            remedy = "runs the target's own layers; put it last"
            require(i == len(self.levels) - 1, f"{where}.levels[{i}]", level.name, remedy)
            for j, below in enumerate(self.levels[:-1]):
                remedy = "is below drafter=self, on the target's ranks; drop what asks for ranks of its own"
                alone = isinstance(below, PlacedDrafterConfig) and below.needs_own_ranks
                require(not alone, f"{where}.levels[{j}]", below.name, remedy)
            together = self.placement is LevelsPlacement.together
            remedy = "has a level on the target's ranks, where all are; use together"
            require(together, f"{where}.placement", self.placement, remedy)
            remedy = "is for drafter=self by itself; give a level `exit`, `skip` or `layers`"
            require(level.search is Search.none, f"{where}.levels[{i}].search", level.search, remedy)

    def is_attached(self, pipeline: str) -> bool:
        last = self.levels[-1]
        return isinstance(last, SelfDrafterConfig) and last.is_attached(pipeline)

    def check_with(self, rule: VerifyRule, pipeline: PipelineName, where: str = "drafter") -> None:
        if isinstance(self.levels[-1], SelfDrafterConfig):
            self.levels[-1].check_with(rule, pipeline, f"{where}.levels[{len(self.levels) - 1}]")
        self._check_lengths(rule, pipeline, where)
        coupled = rule is VerifyRule.coupled
        remedy = "is exact with verify=coupled only; drop it"
        require(coupled or not self.merge, f"{where}.merge", self.merge, remedy)
        last = len(self.levels) - 1
        remedy = "adds to a chain; drop it, or drafter.levels' strategy=tree of the last level"
        require(self.width(last) == 1 or not self.merge, f"{where}.merge", self.merge, remedy)
        remedy = f"are not drawn as verify={rule} needs; take another rule"
        require(not (rule in INDEPENDENT_ONLY and any(self.tails)), f"{where}.tails", self.tails, remedy)
        self.levels[0].check_with(rule, self._first_pipeline(pipeline), f"{where}.levels[0]")

    def _check_lengths(self, rule: VerifyRule, pipeline: PipelineName, where: str) -> None:
        """What chosen lengths, and a level that forwards the drafts of the one before it, can be combined with."""
        fixed, last = self.lengths is LevelLengths.fixed, len(self.levels) - 1
        in_turn = pipeline in (PipelineName.sync, PipelineName.plain)
        alone = not (any(self.tails) or self.merge)
        chains = all(self.width(level) == 1 for level in range(len(self.levels)))
        drawn = rule not in INDEPENDENT_ONLY or isinstance(self.levels[0], ModelDrafterConfig)
        for good, remedy in (
            (
                self.placement is LevelsPlacement.together,
                "needs all levels in one place; add drafter.placement=together",
            ),
            (in_turn, "needs levels and target to work in turn, to measure what each takes; use pipeline=sync"),
            (alone, "chooses among levels without tails; drop drafter.tails and drafter.merge"),
            (chains, "chooses among chains; use strategy=chain for the levels above the first"),
            (drawn, f"may pass on a lookup, which is not drawn as verify={rule} needs; take another rule"),
        ):
            require(fixed or good, f"{where}.lengths", self.lengths, remedy)
        for i, level in enumerate(self.levels):
            name, length = f"{where}.levels[{i}].num_draft_tokens", level.num_draft_tokens
            drafts, ahead = length > 0, i == last and pipeline.works_ahead
            for good, remedy in (
                (
                    drafts or not ahead,
                    "prepares nothing while the target verifies; leave that level out, or use pipeline=sync",
                ),
                (drafts or (length == 0 and i > 0), "must be at least 1; 0 only behind the first level"),
                (drafts or fixed, "is the most that drafter.lengths=auto may choose; it must be at least 1"),
                (drafts or alone, "cannot have tails; drop drafter.tails and drafter.merge"),
                (drafts or drawn, f"passes on a lookup, which is not drawn as verify={rule} needs; take another rule"),
            ):
                require(good, name, length, remedy)

    def with_paths(self, resolve: PathResolver, where: str = "drafter") -> DrafterConfig:
        levels = [level.with_paths(resolve, key) for key, level in self.parts(where)]
        return replace(self, levels=tuple(levels))

    def models_of(self, role: str, pipeline: str) -> Sequence[DrafterConfig]:
        if self.is_attached(pipeline):
            attached = placed_at(Placement.attached, list(self.levels)) if role == "target" else []
            return [model for level in attached for model in level.models_of(role, pipeline)]
        levels = placed_at(Placement.separate, [self.levels[level] for level in self.roles().get(role, ())])
        return [model for level in levels for model in level.models_of(TOP, pipeline)]

    def sampling_kinds(self, rule: VerifyRule, pipeline: PipelineName) -> set[SamplingKind]:
        without = any(self.width(level) > 1 for level in self._reaching()) and rule not in INDEPENDENT_ONLY
        own = {SamplingKind.IID, SamplingKind.WITHOUT_REPLACEMENT} if without else {SamplingKind.IID}
        return own | (self.first_kinds(rule, pipeline) if self._forwards_first_level() else set())

    def first_kinds(self, rule: VerifyRule, pipeline: PipelineName) -> set[SamplingKind]:
        """How the first level draws."""
        return self.levels[0].sampling_kinds(rule, self._first_pipeline(pipeline))

    def _first_pipeline(self, pipeline: PipelineName) -> PipelineName:
        """Sync where the first level shares the last one's ranks: it then drafts on demand only."""
        return pipeline if self.placement is LevelsPlacement.separate else PipelineName.sync

    def _reaching(self) -> list[int]:
        """Levels above the first whose tokens may reach the target without another level's verdict."""
        last, reaching = len(self.levels) - 1, []
        for level in range(last, 0, -1):
            reaching.append(level)
            if self.levels[level].num_draft_tokens and not self.tail(level) and self.lengths is LevelLengths.fixed:
                break
        return reaching

    def _forwards_first_level(self) -> bool:
        """Whether tokens of the first level may reach the target unverified: in tails, past levels of length 0."""
        left_out = self.lengths is LevelLengths.auto or not any(level.num_draft_tokens for level in self.levels[1:])
        return left_out or (bool(self.tails) and all(self.tails[1:]))

    @property
    def copying_names(self) -> tuple[str, ...]:
        return (self.name,) if any(one.copying_names for one in self.levels) else ()

    @property
    def is_chain(self) -> bool:
        passed_on = [level for level in self._reaching() if self.width(level) > 1]
        return not (self.merge or passed_on) and (self.levels[0].is_chain or not self._forwards_first_level())

    def build(self, setup: DraftSetup) -> tuple[Drafter, dict[str, object]]:
        from actors.drafters.cascade.build import build_cascade

        return build_cascade(self, setup)
