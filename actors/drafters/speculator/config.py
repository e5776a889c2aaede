"""The configuration record of `drafter=speculator`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from actors.drafters.config import DrafterConfig, DraftSetup, PathResolver
from actors.drafters.model.config import CalibrationPolicy, LearningDrafterConfig
from actors.options import CHECKPOINT, DEVICES, PipelineName, VerifyRule
from actors.topology import TOP
from parallel.ranges import OneOf, Range, errors_of, require

if TYPE_CHECKING:
    from actors.drafters.interface import Drafter
    from actors.options import SchedulerConfig, TargetConfig
    from parallel.runtime.decoder_runner import DecoderRunner
    from parallel.speculators.config import SpeculatorConfig
    from parallel.speculators.fusing import TapFuser
    from parallel.speculators.memory import SpeculatorMemory


@dataclass(frozen=True, slots=True)
class SpeculatorDrafterConfig(LearningDrafterConfig):
    """A module trained on the target's hidden states: as its checkpoint says, heads, a layer, a block."""

    name: str = "speculator"
    path: str = "pocket"
    """A checkpoint directory or a hub id: one made by `job=train job.recipe=NAME`, or a published one; `pocket` for the
    bundled one of the bundled target."""
    ranks: Annotated[int, Range(1, cap=1)] = 1
    """placement=separate: ranks of its role, which is one."""
    num_threads: Annotated[int, Range(0, zero="one for every core of a rank")] = 0
    """placement=separate, CPU: threads of its rank, at most; 0 = one for every core that it has."""
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    """placement=separate: cpu, cuda, or auto, as `target.device`."""

    prune_below: Annotated[float, Range(0, 1, zero="none")] = 0.0
    """Speculative Streaming, verify=coupled: the target gives up nodes whose early probability is below this."""
    reads_features = True

    def check_with(self, rule: VerifyRule, pipeline: PipelineName, where: str = "drafter") -> None:
        super(SpeculatorDrafterConfig, self).check_with(rule, pipeline, where)
        remedy = "a ratio rule must test every node that was drawn; use verify=coupled, or drop it"
        require(not self.prune_below or rule is VerifyRule.coupled, f"{where}.prune_below", self.prune_below, remedy)

    def check_fields(self, where: str) -> None:
        super(SpeculatorDrafterConfig, self).check_fields(where)
        remedy = "is for models whose rows follow from text alone; drop it"
        require(self.keeps_all_rows, f"{where}.rows", self.rows, remedy)
        require(bool(self.path), f"{where}.path", self.path, CHECKPOINT)

    def speculators(self) -> list[str]:
        return [self.path]

    def models_of(self, role: str, pipeline: str) -> Sequence[DrafterConfig]:
        own = "target" if self.is_attached(pipeline) else TOP
        return [self] if role == own else []

    def taps(self, target_layers: int) -> tuple[int, ...]:
        from parallel.speculators.registry import read_speculator

        return read_speculator(self.path, target_layers).taps

    def open_fuser(self, target_layers: int, device: str) -> TapFuser | None:
        from actors.drafters.speculator.drafter import open_feature_fuser

        return open_feature_fuser(self, target_layers, device)

    def on_target(self, target: DecoderRunner) -> DecoderRunner:
        from parallel.speculators.opening import with_streams

        return with_streams(self.path, target, self.prune_below)

    def memory(self, target: TargetConfig, ranks: int, device: str) -> SpeculatorMemory:
        """What a rank of so many holds; loads no tensor."""
        from parallel.model.families.registry import read_config
        from parallel.runtime.model_bytes import dtype_name, weights_name
        from parallel.speculators.memory import speculator_memory

        dtype = dtype_name(self.dtype, device)
        weights = weights_name(self.weights, dtype, device)
        return speculator_memory(self.path, read_config(target.path).num_layers, ranks, dtype, weights)

    def table_bytes(self, target: TargetConfig, ranks: int, device: str) -> int:
        """Bytes, on a rank of so many, of its own copy of the target's embedding and head, which it has when it is not
        attached."""
        from parallel.model.families.registry import read_config
        from parallel.runtime.model_bytes import model_memory

        tables = replace(read_config(target.path), num_layers=0)
        return model_memory(tables, target.path, ranks, device, (self.dtype, target.weights, "auto"))[0]

    def memory_beside(
        self, target: TargetConfig, ranks: int, device: str, scheduler: SchedulerConfig
    ) -> tuple[int, int]:
        memory = self.memory(target, ranks, device)
        if self.kv_slots:
            return memory.weight_bytes + self.kv_slots * memory.bytes_per_slot, 0
        return memory.weight_bytes, memory.bytes_per_slot

    def with_paths(self, resolve: PathResolver, where: str = "drafter") -> SpeculatorDrafterConfig:
        config = replace(self, path=resolve.checkpoint(f"{where}.path", self.path, is_model=False)).with_state(where)
        config._check_record(resolve.target, where)
        config._check_place(resolve.pipeline, where)
        return replace(config, tree=config._tree_file(resolve, f"{where}.tree")) if self.tree else config

    def _check_record(self, target: str, where: str) -> None:
        from parallel.model.families.registry import read_config
        from parallel.speculators.registry import read_speculator

        shape = read_config(target)
        with errors_of(f"{where}.path"):
            record = read_speculator(self.path, shape.num_layers)
            record.check_target(shape)
        self._check_learnable(record, where)
        policy = self.calibration_policy
        remedy = f"{record.method} drafts blocks, which begin behind the target's features; use every or mismatch"
        calibrates = not record.drafts_blocks or policy is not CalibrationPolicy.never
        require(calibrates, f"{where}.calibration_policy", policy, remedy)
        remedy = "its checkpoint has no early logits; train with job.options={prune_rank: 32}, or drop it"
        require(record.has_early_logits or not self.prune_below, f"{where}.prune_below", self.prune_below, remedy)

    def _check_learnable(self, record: SpeculatorConfig, where: str) -> None:
        if not self.online:
            return
        from parallel.speculators.adapted import check_learnable

        with errors_of(f"{where}.online=True"):
            check_learnable(record)

    def _check_place(self, pipeline: str, where: str) -> None:
        from parallel.speculators.registry import read_speculator

        remedy = "needs a rank that idles while the target works; use drafter.placement=separate"
        require(not (self.online and self.is_attached(pipeline)), f"{where}.online", True, remedy)
        placed = self.is_attached(pipeline) or pipeline == PipelineName.plain
        remedy = "drafts with the target's own layers, on its ranks; use pipeline=sync with drafter.placement=attached"
        require(placed or not read_speculator(self.path).runs_target, f"{where}.path", self.path, remedy)

    def build(self, setup: DraftSetup) -> tuple[Drafter, dict[str, object]]:
        from actors.drafters.speculator.drafter import build_speculator_drafter

        return build_speculator_drafter(self, setup)
