"""What the configuration records of all drafters have in common.

A drafter's record stands beside the drafter and checks itself: ranges of its fields, what it cannot be combined with,
the checkpoints it loads, how its tokens are drawn, and how to build the drafter. Torch-free; `build` imports what it
needs. It must not know Hydra.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from actors.options import PipelineName, SchedulerConfig, TargetConfig, VerifyConfig, VerifyRule
from actors.protocol.messages import SamplingKind
from actors.topology import TOP
from actors.verification.compatibility import DraftTrait
from parallel.ranges import Choice, require

if TYPE_CHECKING:
    from actors.drafters.interface import Drafter
    from actors.transport.mailbox import Mailbox
    from parallel.comm.group import Group
    from parallel.runtime.decoder_runner import DecoderRunner
    from parallel.runtime.interface import Runner
    from parallel.runtime.kv_sizing import DeviceShare
    from parallel.speculators.fusing import TapFuser


OpenedModel = TypeVar("OpenedModel", bound="tuple[Runner, *tuple[Any, ...]]")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a drafter with a model takes from the launch."""

    rule: str
    law_size: int
    eos_token_ids: tuple[int, ...]
    prefill_chunk: int


class Placement(StrEnum):
    """Where a drafter runs."""

    auto = "auto"
    attached = "attached"
    separate = "separate"


class OpenedModels:
    """The runners of a rank's drafter, each with what its `open_one` returned beside it, in the order in which they
    were opened. A drafter that is built anew gets the same again."""

    def __init__(self) -> None:
        self._opened: list[Any] = []
        self._num_given = 0

    def begin_again(self) -> None:
        """The next one is the first, and none knows rows of a text."""
        self._num_given = 0
        for runner, *_ in self._opened:
            runner.forget_texts()

    def next(self, open_one: Callable[[], OpenedModel]) -> OpenedModel:
        """The next one, opened if it is not yet."""
        if self._num_given == len(self._opened):
            self._opened.append(open_one())
        self._num_given += 1
        return self._opened[self._num_given - 1]


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """The launch options and the rank that a drafter is built for."""

    verify: VerifyConfig
    pipeline: str
    scheduler: SchedulerConfig
    group: Group
    device: str
    eos_token_ids: tuple[int, ...]
    target: TargetConfig = field(default_factory=TargetConfig)
    target_runner: DecoderRunner | None = None
    """The target itself, if the drafter is attached to its ranks."""
    sharing: DeviceShare | None = None
    """What this rank shares its device with; None if it has it alone."""
    role: str = TOP
    """One of `DrafterConfig.roles()`."""
    mailbox: Mailbox | None = None
    """The rank's, for a drafter whose drafts come from ranks of another role."""
    adaptive: bool = True
    """The value of `pipeline.adaptive`."""
    opened: OpenedModels = field(default_factory=OpenedModels, compare=False)
    """The models that were opened for a drafter of this setup."""

    @property
    def agreed_slots(self) -> int:
        """KV slots that a model beside the target has at most, which all ranks know: those of the target, whose size
        counted it. The successor of one rank has no peer that would measure with it. 0: not on the target's ranks."""
        return 0 if self.target_runner is None else self.target_runner.pool.num_slots

    @property
    def model_options(self) -> ModelOptions:
        rule, law_size = self.verify.rule, self.verify.law_size
        return ModelOptions(rule, law_size, self.eos_token_ids, self.scheduler.prefill_chunk)


class PathResolver(Protocol):
    """Turns the paths of a record into absolute paths that exist; raises ValueError, one line, for others."""

    @property
    def target(self) -> str:
        """The target's checkpoint directory."""
        ...

    @property
    def target_layers(self) -> int:
        """The target's layers, those of `target.stretch` included."""
        ...

    @property
    def pipeline(self) -> str:
        """The name of the pipeline."""
        ...

    def checkpoint(self, key: str, path: str, *, is_model: bool = True) -> str:
        """The directory of a checkpoint that is given as a directory, a hub id or the name of a bundled one; of a
        supported model if it `is_model`."""
        ...

    def file(self, key: str, path: str, wanted: str) -> str:
        """The path of a file; `wanted` ends the error line."""
        ...


class TypedPart(Protocol):
    """Makes the record of a drafter inside another."""

    def __call__(self, entry: Any, where: str, excluded: Set[str], noun: str) -> DrafterConfig:
        """Returns the record for a name, or for keys with a name, of any drafter but the `excluded`; raises ValueError,
        one line, for another. The `noun` says what the drafter is there."""
        ...


MEASURED = "kv_slots", "mlp_parallel"
"""Options whose default is measured by all ranks of a role together, and facts of these names."""
PARTS = "parts"
"""The fact with such facts of the drafters that a drafter consists of, by their places."""


def measured_facts(facts: Mapping[str, object]) -> dict[str, object]:
    return {name: facts[name] for name in (*MEASURED, PARTS) if name in facts}


@dataclass(frozen=True, slots=True)
class DrafterConfig(Choice):
    """Base of every drafter's record. `where` in its methods is the prefix of error lines, such as `drafter`."""

    name: str = ""
    """Set by the choice `drafter=`."""

    # A record of which one of these does not hold replaces it, by a constant or by a property of its fields.

    is_chain = False
    """Whether no node of its proposals has several children."""
    runs_passes = False
    """Whether a draft takes passes of a model, beside which a lookup takes no time."""
    chooses_lengths = False
    """Whether the drafter itself decides how many of the ordered tokens are worth drafting."""
    target_top_k = 0
    """Likeliest tokens of the target's distribution at every verified row that the drafter learns from; 0: none."""
    learns_later = False
    """Whether it can read these tokens a pass later, because no draft is made of them."""
    reads_prompts = False
    """Whether the rows of prompts count as verified; the target then computes their logits too."""
    reads_features = False
    """Whether the drafter reads hidden states of the target: those of `taps`."""
    is_elsewhere = False
    """Whether its drafts come from a rank that another process lends, and this engine starts none."""
    num_seats = 0
    """Draft ranks that pools lend at a time."""

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens a round, at most; a field of every record but that of `drafter=none`."""
        return 0

    @property
    def member_names(self) -> tuple[str, ...]:
        """The names by which a request may choose it, or one of the drafters that it consists of."""
        return (self.name,)

    def names_in(self, pipeline: str) -> tuple[str, ...]:
        """Those that a request may choose in this pipeline."""
        return () if pipeline == PipelineName.plain else self.member_names

    def measured(self, facts: Mapping[str, Any]) -> Self:
        """The record with what the ranks of its role measured together as they opened it, by their facts. A successor
        of one of them has no peer that would measure with it."""
        names = {option.name for option in fields(self)}
        return replace(self, **{name: value for name, value in facts.items() if name in names.intersection(MEASURED)})

    @property
    def copying_names(self) -> tuple[str, ...]:
        """Those whose drafts may copy from the reference that a request brings."""
        return ()

    def parts(self, where: str = "") -> list[tuple[str, DrafterConfig]]:
        """The drafters that it consists of, each with the prefix of its error lines. What is asked of their models is
        asked of each."""
        return []

    @property
    def paces_ms(self) -> list[Any]:
        """`pace_ms` of those of its models that have one."""
        return [pace for _, one in self.parts() for pace in one.paces_ms]

    def taps(self, target_layers: int) -> tuple[int, ...]:
        """Residual streams of the target that the drafter reads, as `parallel.speculators.config` numbers them; loads
        the checkpoint's record."""
        return ()

    def open_fuser(self, target_layers: int, device: str) -> TapFuser | None:
        """What the target makes of the taps before they leave for a drafter elsewhere; None: they leave as they are."""
        return None

    def on_target(self, target: DecoderRunner) -> DecoderRunner:
        """The target's runner, or another that also computes what this drafter reads."""
        return target

    def memory_beside(
        self, target: TargetConfig, ranks: int, device: str, scheduler: SchedulerConfig
    ) -> tuple[int, int]:
        """Bytes on each of the target's ranks, if it is attached to them, and those for each of the target's KV slots;
        upper bounds, before anything is loaded."""
        sizes = [one.memory_beside(target, ranks, device, scheduler) for _, one in self.parts()]
        return sum([held for held, _ in sizes]), sum([per_slot for _, per_slot in sizes])

    def is_attached(self, pipeline: str) -> bool:
        """Whether it runs on the target's ranks, and drafts right after each verdict."""
        return False

    @property
    def lenders(self) -> list[tuple[str, str]]:
        """(address, file of its key) of each pool that lends it."""
        return []

    def is_bridged(self, pipeline: str) -> bool:
        """Whether hidden states of the target are sent to ranks of its own."""
        return self.reads_features and pipeline != PipelineName.plain and not self.is_attached(pipeline)

    @property
    def scores_drafts(self) -> bool:
        """Whether it can draft without a pass, so that its drafts may be compared with text that is decoded plainly."""
        return not self.runs_passes

    def roles(self) -> dict[str, range]:
        """Role -> the drafter's levels that it runs, starting with the role whose drafts the target verifies; a drafter
        without levels is one role."""
        return {TOP: range(1)}

    def models_of(self, role: str, pipeline: str) -> Sequence[DrafterConfig]:
        """The records of the models that a role, be it the target's, loads for drafting; each has `ranks` and a
        `device`."""
        return []

    def with_typed_parts(self, typed: TypedPart, where: str) -> DrafterConfig:
        """The record with those of the drafters it consists of, which are names and keys so far; ValueError, one line,
        for what is none."""
        return self

    def check_with(self, rule: VerifyRule, pipeline: PipelineName, where: str = "drafter") -> None:
        """Raise ValueError for a field that cannot be combined with this verification rule or pipeline."""

    def with_paths(self, resolve: PathResolver, where: str = "drafter") -> DrafterConfig:
        """The record with the absolute paths of its checkpoints and files."""
        return self

    def check_checkpoints(self, where: str = "drafter") -> None:
        """Raise ValueError if a checkpoint of `models()`, which must exist, does not fit the other fields."""
        for key, one in self.parts(where):
            one.check_checkpoints(key)

    def models(self) -> list[str]:
        """Paths of the checkpoints that the drafter loads."""
        return [path for _, one in self.parts() for path in one.models()]

    def speculators(self) -> list[str]:
        """Paths of the checkpoints of modules that read the target's hidden states."""
        return [path for _, one in self.parts() for path in one.speculators()]

    def translated_models(self) -> list[str]:
        """Those of `models` whose tokenizers are not the target's."""
        return [path for _, one in self.parts() for path in one.translated_models()]

    def sampling_kinds(self, rule: VerifyRule, pipeline: PipelineName) -> set[SamplingKind]:
        """How the tokens of its proposals are drawn, as far as a verification rule must know."""
        return {SamplingKind.DETERMINISTIC}

    @property
    def draft_traits(self) -> set[DraftTrait]:
        """What else a verification rule must know of its proposals."""
        return set() if self.is_chain else {DraftTrait.BRANCHES}

    def build(self, setup: DraftSetup) -> tuple[Drafter, dict[str, object]]:
        """The drafter on this rank, and the facts that its role reports. Its models are opened by `setup.opened`."""
        raise ValueError(f"drafter={self.name}: has no drafter to build")

    def rebuilder(self, setup: DraftSetup) -> Callable[[], Drafter] | None:
        """Makes the drafter of this setup anew, as one that has learned nothing; None for a rank alone, whose drafter
        need not agree with another."""

        def rebuild() -> Drafter:
            setup.opened.begin_again()
            return self.build(setup)[0]

        return None if setup.group.size == 1 else rebuild


@dataclass(frozen=True, slots=True)
class PlacedDrafterConfig(DrafterConfig):
    """A drafter that can run on the target's ranks."""

    placement: Placement = Placement.auto
    """attached: on the target's ranks, where it drafts right after each verdict; for pipeline=sync. separate: as a role
    of its own. auto: attached with pipeline=sync, where drafter and target work in turn and each then has all devices,
    unless another of its keys asks for ranks of its own; else separate."""

    needs_own_ranks = False
    """Whether its other fields ask for ranks of its own."""

    def is_attached(self, pipeline: str) -> bool:
        by_default = self.placement is Placement.auto and pipeline == PipelineName.sync and not self.needs_own_ranks
        return by_default or self.placement is Placement.attached

    def check_with(self, rule: VerifyRule, pipeline: PipelineName, where: str = "drafter") -> None:
        remedy = f"drafts between two passes of the target, not beside one as pipeline={pipeline} does; use sync"
        in_turn = pipeline in (PipelineName.sync, PipelineName.plain)
        require(in_turn or self.placement is not Placement.attached, f"{where}.placement", self.placement, remedy)


def placed_at(place: Placement, drafters: Sequence[Any]) -> list[Any]:
    """The drafters that can be anywhere, there; others as they are."""
    return [replace(one, placement=place) if isinstance(one, PlacedDrafterConfig) else one for one in drafters]


@dataclass(frozen=True, slots=True)
class NoDrafterConfig(DrafterConfig):
    """No drafter: every proposal is empty."""

    name: str = "none"
    is_chain = True

    @property
    def member_names(self) -> tuple[str, ...]:
        return ()

    def sampling_kinds(self, rule: VerifyRule, pipeline: PipelineName) -> set[SamplingKind]:
        return set()
