"""`drafter=speculator`: drafts with a module that reads the target's hidden states.

The drafting is that of `drafter=model`; a request is drafted for once the features of all its committed tokens but the
last have been read. Knows no family of speculators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from actors.drafters.interface import Context, FeatureRows
from actors.drafters.model.ahead_drafter import AheadDrafter
from actors.drafters.model.drafter import ModelDrafter
from actors.options import PipelineName
from parallel.kernels.products import has_products
from parallel.model.checkpoint import holds_bfloat16, resolve_checkpoint
from parallel.model.families.registry import read_config
from parallel.model.layers.weight import Stored
from parallel.runtime.kv_sizing import affordable_slots, choose_dtype, choose_weights
from parallel.runtime.pacing import pace
from parallel.speculators.memory import speculator_memory
from parallel.speculators.opening import open_fuser, open_speculator, open_tables
from parallel.speculators.place import SpeculatorPlace
from parallel.speculators.registry import read_speculator
from parallel.speculators.runner import SpeculatorRunner

if TYPE_CHECKING:
    from actors.drafters.config import DraftSetup, ModelOptions
    from actors.drafters.online.drafter import OnlineDrafter
    from actors.drafters.speculator.config import SpeculatorDrafterConfig
    from actors.options import SchedulerConfig
    from parallel.kv.row_limits import RowLimits
    from parallel.runtime.decoder_runner import DecoderRunner
    from parallel.speculators.fusing import TapFuser


class _ReadsFeatures(ModelDrafter):
    """What drafting in turn and ahead have in common: drafts wait for features, and so does the text before them."""

    runner: SpeculatorRunner

    @property
    def feature_size(self) -> int:
        return self.runner.speculator.feature_size

    def read_features(self, features: FeatureRows) -> None:
        self.runner.read_features(features.request_id, features.start, features.rows)

    def _with_room(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[tuple[Context, int]]:
        return [order for order in super()._with_room(contexts, budgets) if self._can_feed(order[0])]

    def _can_feed(self, context: Context) -> bool:
        """Whether the text has a row to draft from, and its features are known: a text of one token may have none."""
        num_tokens, request_id = len(context.token_ids), context.request_id
        return self.runner.cached_len(request_id) < num_tokens <= self.runner.num_known(request_id) + 1

    def _prefill(self, context: Context, leave: int) -> None:
        known = self.runner.num_known(context.request_id)
        super()._prefill(context, max(leave, len(context.token_ids) - known))


class SpeculatorDrafter(_ReadsFeatures):
    """Drafts in turn with the target."""

    def __init__(self, runner: SpeculatorRunner, config: SpeculatorDrafterConfig, options: ModelOptions) -> None:
        super().__init__(runner, config, options)
        self.capabilities = replace(self.capabilities, reads_features=self, shares_rows=runner.self_draft)


class AheadSpeculatorDrafter(_ReadsFeatures, AheadDrafter):
    """Drafts on its own states while the target verifies."""

    def __init__(
        self, runner: SpeculatorRunner, config: SpeculatorDrafterConfig, options: ModelOptions, pipeline: str
    ) -> None:
        AheadDrafter.__init__(self, runner, config, options, pipeline)
        self.capabilities = replace(self.capabilities, reads_features=self)


def build_speculator_drafter(
    config: SpeculatorDrafterConfig, setup: DraftSetup
) -> tuple[SpeculatorDrafter | AheadSpeculatorDrafter | OnlineDrafter, dict[str, object]]:
    """The drafter beside the target's own tables if it is attached, else beside its own copy of them."""
    runner, place, facts = setup.opened.next(lambda: _open(config, setup))
    drafter = (
        AheadSpeculatorDrafter(runner, config, setup.model_options, setup.pipeline)
        if PipelineName(setup.pipeline).works_ahead
        else SpeculatorDrafter(runner, config, setup.model_options)
    )
    return (_learning(drafter, config, setup.target.path, place) if config.online else drafter), facts


def _open(
    config: SpeculatorDrafterConfig, setup: DraftSetup
) -> tuple[SpeculatorRunner, SpeculatorPlace, dict[str, object]]:
    """The method's module on this rank, where it is, and the facts that its role reports."""
    device, target, target_runner = setup.device, setup.target, setup.target_runner
    dtype, weights = _types(config if target_runner is None else _as_target(config, target_runner), device)
    if target_runner is not None:
        tables = target_runner.decoder
    else:
        tables_weights = choose_weights(target.weights, config.dtype, device, target.path)
        tables = open_tables(target.path, setup.group, device, dtype, tables_weights)
    num_layers = read_config(resolve_checkpoint(target.path)).num_layers
    record = read_speculator(config.path, num_layers)
    beside = 0 if target_runner is None else target_runner.pool.num_slots
    names = (str(each).removeprefix("torch.") for each in (dtype, weights))
    memory = speculator_memory(config.path, num_layers, setup.group.size, *names)
    if not (num_slots := config.kv_slots or beside):
        length = min(record.max_positions, target.max_model_len or record.max_positions)
        sizes = memory.weight_bytes, memory.bytes_per_slot  # of what is still to be loaded
        most = setup.scheduler.max_num_seqs * length
        num_slots = affordable_slots(config.path, setup.group, device, *sizes, most=most, sharing=setup.sharing)
    copied = config.table_bytes(target, setup.group.size, device) if target_runner is None else 0
    place = SpeculatorPlace(
        tables,
        setup.group,
        device,
        dtype,
        num_slots,
        weights,
        target_layers=num_layers,
        target=target_runner,
        reads_fused=target_runner is None and record.travels_fused,
        slots_of_windows=partial(_slots_of_windows, config, setup.scheduler),
    )
    runner = open_speculator(config.path, place)
    pace(runner, config.pace_ms)
    facts: dict[str, object] = {
        "checkpoint": config.path,
        "method": runner.speculator.method,
        "kv_slots": num_slots,
        "weight_bytes": memory.weight_bytes + copied,
        "kv_bytes": runner.kv_bytes or num_slots * memory.bytes_per_slot,
    }
    return runner, place, facts


def _slots_of_windows(config: SpeculatorDrafterConfig, scheduler: SchedulerConfig, limits: RowLimits) -> int:
    """KV slots for all requests where each keeps so many rows."""
    drafted = max(config.num_draft_tokens, config.depth * config.width)
    return scheduler.max_num_seqs * limits.most_with(scheduler.prefill_chunk, drafted)


def _learning(
    drafter: SpeculatorDrafter | AheadSpeculatorDrafter,
    config: SpeculatorDrafterConfig,
    target: str,
    place: SpeculatorPlace,
) -> OnlineDrafter:
    from actors.drafters.model.learning import learning
    from actors.drafters.online.learner import RANK
    from parallel.speculators.adapted import AdaptedDraftLayers, layer_weights
    from parallel.speculators.eagle.runner import DraftLayerRunner

    runner = drafter.runner
    assert isinstance(runner, DraftLayerRunner), "checked with the record"
    rank = min(RANK, runner.speculator.target_hidden)
    model = AdaptedDraftLayers(config.path, target, place.device, rank, reads_fused=place.reads_fused)
    return learning(drafter, layer_weights(runner.layers), model, config)


def open_feature_fuser(config: SpeculatorDrafterConfig, target_layers: int, device: str) -> TapFuser | None:
    """Opens the fuser as the drafter itself would compute with it on this device."""
    return open_fuser(config.path, target_layers, device, *_types(config, device))


def _as_target(config: SpeculatorDrafterConfig, target: DecoderRunner) -> SpeculatorDrafterConfig:
    """The runner in the type of the target whose embedding and head it shares."""
    dtype = str(target.decoder.dtype).removeprefix("torch.")
    if config.dtype not in ("auto", dtype):
        raise ValueError(
            f"drafter.dtype={config.dtype}: shares the target's embedding and head, which compute in {dtype}; "
            "drop it, or use drafter.placement=separate"
        )
    return replace(config, dtype=dtype)


def _types(config: SpeculatorDrafterConfig, device: str) -> tuple[torch.dtype, Stored]:
    """The types in which it computes, and in which its matrices are stored."""
    dtype = choose_dtype(config.dtype, device)
    weights = choose_weights(config.weights, config.dtype, device)
    assert weights != "packed", "speculators are read unquantised"
    has_kernels = dtype == torch.float32 and device == "cpu" and has_products()
    if config.weights == "auto" and has_kernels and holds_bfloat16(Path(config.path)):
        weights = torch.bfloat16 if config.online else torch.int8
    return dtype, weights
