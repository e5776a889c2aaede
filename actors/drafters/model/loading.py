"""Loads a draft model on this rank from its record: whole, tensor-parallel or layer-parallel.

What only some records ask for is imported where it is built: pipelines that work ahead, other tokenizers, learning,
prefixes of layers, KV rows that are dropped, and checkpoints that fill masks.
"""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from actors.drafters.config import DraftSetup
from actors.drafters.interface import Drafter
from actors.drafters.model.config import (
    Calibration,
    LengthRule,
    MlpParallel,
    ModelDrafterConfig,
    Strategy,
    Translation,
)
from actors.drafters.model.drafter import ModelDrafter
from actors.drafters.model.layer_partition import layer_partition
from actors.options import Parallel, PipelineName, SchedulerConfig
from actors.protocol.messages import SamplingParams
from actors.sampling.logits import ChoicesAhead
from parallel.comm.group import Group
from parallel.kv.row_limits import RowLimits
from parallel.model.checkpoint import resolve_checkpoint
from parallel.model.config import HeadRows
from parallel.model.config_fields import MASK_FIELD, read_config_file
from parallel.model.families.registry import read_config
from parallel.model.partition import LayerLayout
from parallel.runtime.graph_list import GraphList, chain_shapes, graph_shapes
from parallel.runtime.interface import Runner
from parallel.runtime.kv_sizing import DeviceShare, choose_dtype, fit_slots
from parallel.runtime.model_bytes import dtype_name
from parallel.runtime.pacing import pace
from parallel.runtime.profiling import faster_mlp
from parallel.runtime.runner import ModelRunner, captured_facts, open_model

if TYPE_CHECKING:
    from actors.drafters.online.drafter import OnlineDrafter
    from actors.drafters.vocabulary.token_pieces import TokenPieces
    from parallel.runtime.row_policies import PartialRows

_FEWEST = 2


def build_model_drafter(config: ModelDrafterConfig, setup: DraftSetup) -> tuple[Drafter, dict[str, object]]:
    """The drafter of this pipeline over its model, and the facts it reports."""
    given = setup.scheduler, setup.group, setup.device, setup.pipeline, setup.sharing, setup.agreed_slots
    runner, facts = setup.opened.next(lambda: open_draft_model(config, *given))
    if config.tokenizer and config.translate is Translation.strings:
        from actors.drafters.model.string_drafter import StringDrafter

        return StringDrafter(runner, *_token_pieces(config), setup.scheduler.prefill_chunk), facts
    if PipelineName(setup.pipeline).works_ahead:
        from actors.drafters.model.ahead_drafter import AheadDrafter

        drafter = AheadDrafter(runner, config, setup.model_options, setup.pipeline)
    else:
        drafter = ModelDrafter(runner, config, setup.model_options)
    if not config.online:
        return drafter, facts
    return _learning(drafter, config), facts


def _learning(drafter: ModelDrafter, config: ModelDrafterConfig) -> OnlineDrafter:
    from actors.drafters.model.learning import learning
    from actors.drafters.online.learner import RANK
    from parallel.training.adapted import AdaptedDecoder, block_weights

    decoder = drafter.runner.decoder
    model = AdaptedDecoder(decoder.config, config.path, decoder.device, min(RANK, decoder.config.hidden_size))
    return learning(drafter, block_weights(decoder.layers), model, config)


def open_draft_model(
    config: ModelDrafterConfig,
    scheduler: SchedulerConfig,
    group: Group,
    device: str,
    pipeline: str = PipelineName.sync,
    sharing: DeviceShare | None = None,
    agreed_slots: int = 0,
) -> tuple[Runner, dict[str, object]]:
    """This rank's part of the draft model, and the facts it reports; `agreed_slots` as of `DraftSetup`."""
    layout = layer_layout(config, group, device, pipeline) if config.parallel is Parallel.layer else None
    head = head_rows(config)
    weights = config.weights
    if config.online and weights == "auto" and device.startswith("cuda"):
        weights = dtype_name(config.dtype, device)  # learned matrices are no codes
    graphs = graph_list(config, scheduler, pipeline)
    fit = fit_slots(
        config.path,
        group,
        device,
        config.dtype,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=config.most_rows(scheduler),
        num_slots=config.kv_slots,
        layout=layout,
        weights=weights,
        rounds=not config.online,
        kv_dtype=config.kv_dtype,
        head=head,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        graphs=graphs,
        sharing=sharing,
        agreed_slots=agreed_slots,
    )
    facts = fit.facts()
    if head is not None:
        facts["draft_vocabulary"] = len(head.rows)
    if layout is not None:
        groups = [len(members) for members in layout.partition]
        facts |= {"layer_groups": groups, "mlp_parallel": layout.mlp, "calibration": layout.calibration}
    options = {"layout": layout, "weights": fit.weights, "head": head, "backend": config.attention}
    options["kv_dtype"] = fit.kv_dtype
    runner = open_model(config.path, group, device, fit.dtype, fit.num_slots, **options)
    if config.prefixes:
        from parallel.runtime.nested_runner import NestedRunner

        depths, backend = (config.prefixes, config.prefix_confidence), runner.attention
        runner = NestedRunner(runner.decoder, runner.pool, *depths, backend=backend)
    if not config.keeps_all_rows:
        runner.keep_rows_by(_policy_of(config, runner))
    facts |= captured_facts(runner, graphs, choices=partial(_sampled_chains, runner.decoder.device))
    facts["pass_bytes"] = runner.decoder.pass_bytes()
    reads_text: Runner = runner
    if layout is None and not config.prefixes and _fills_masks(config):
        from parallel.speculators.pard import filling_masks

        reads_text = filling_masks(runner, config.path, config.mask_steps, config.mask_drafts)
        facts["passes_per_draft"] = reads_text.num_steps
    runner = _translated(reads_text, config, head)
    pace(runner, config.pace_ms)
    return runner, facts


def _fills_masks(config: ModelDrafterConfig) -> bool:
    """Whether the draft model is trained to."""
    return MASK_FIELD in read_config_file(resolve_checkpoint(config.path))


def _policy_of(config: ModelDrafterConfig, runner: ModelRunner) -> PartialRows:
    """What keeps the rows of the draft model."""
    from parallel.runtime.row_policies import ChunkRows, StreamingRows

    limits = config.row_limits
    if isinstance(limits, RowLimits):
        return StreamingRows(runner.decoder, runner.pool, limits)
    return ChunkRows(runner.decoder, runner.pool, limits)


def graph_list(config: ModelDrafterConfig, scheduler: SchedulerConfig, pipeline: str) -> GraphList:
    """What this drafter captures at its start: passes behind the text, and chains, or the levels of its trees."""
    longest, sequences = config.num_draft_tokens, scheduler.max_num_seqs
    shapes = graph_shapes(sequences, 1 + longest, scheduler.max_num_batched_tokens)
    is_ordered = config.strategy is Strategy.chain and config.length_rule is LengthRule.ordered
    if not is_ordered or PipelineName(pipeline).works_ahead:
        return GraphList(shapes, of_last_rows=True)
    is_whole = config.parallel is not Parallel.layer and not config.prefixes and not config.tokenizer
    chains = chain_shapes(sequences, longest - 1) if is_whole else []
    return GraphList(shapes, chains, of_every_row=False, of_last_rows=True)


def _sampled_chains(device: torch.device, num_sequences: int, num_steps: int) -> ChoicesAhead:
    return ChoicesAhead.of([SamplingParams(temperature=1.0)] * num_sequences, [0] * num_sequences, num_steps, device)


def _translated(runner: Runner, config: ModelDrafterConfig, head: HeadRows | None) -> Runner:
    """The runner as one of the target's tokens, if its own differ."""
    if not config.tokenizer or head is None:
        return runner
    from actors.drafters.vocabulary.translated_runner import TranslatedRunner

    target, draft = _token_pieces(config)
    pairs = dict(zip(head.columns, head.rows, strict=True))
    return TranslatedRunner(runner, target, draft, pairs, head.width)


def _token_pieces(config: ModelDrafterConfig) -> tuple[TokenPieces, TokenPieces]:
    """The tokens of the target and of the draft model as text."""
    from actors.drafters.vocabulary.token_pieces import TokenPieces

    return TokenPieces(Path(config.tokenizer)), TokenPieces(Path(config.path))


def head_rows(config: ModelDrafterConfig) -> HeadRows | None:
    """The tokens that the drafter may propose, by its tokenizer and `drafter.vocabulary`; None: all of the model's.

    ValueError, one line, if these are too few.
    """
    width = size = read_config(resolve_checkpoint(config.path)).vocab_size
    pairs: dict[int, int] | None = None
    if config.tokenizer:
        if config.translate is Translation.strings:
            _token_pieces(config)
            return None
        width = read_config(resolve_checkpoint(config.tokenizer)).vocab_size
        from actors.drafters.vocabulary.token_pieces import shared_tokens

        shared = shared_tokens(*_token_pieces(config))
        pairs = {token: draft for token, draft in shared if token < width and draft < size}
    if config.vocabulary:
        from actors.drafters.vocabulary.token_list import read_token_list

        listed = read_token_list(Path(config.vocabulary))[: config.vocabulary_size or None]
        pairs = {token: token for token in listed if token < size} if pairs is None else pairs
        pairs = {token: pairs[token] for token in sorted(listed) if token in pairs}
    if pairs is not None and len(pairs) < _FEWEST:
        raise ValueError(f"{config.path} can draft {len(pairs)} of the target's tokens")
    return None if pairs is None else HeadRows(tuple(pairs.values()), tuple(pairs), width)


def layer_layout(
    config: ModelDrafterConfig, group: Group, device: str, pipeline: str = PipelineName.sync
) -> LayerLayout:
    """The layout of the draft model. `mlp_parallel=auto` measures both ways on all ranks, over the number of rows that
    most fuzzy passes of the pipeline feed."""
    model = read_config(resolve_checkpoint(config.path))
    mlp: Any = str(config.mlp_parallel)
    if config.mlp_parallel is MlpParallel.auto:
        whole = config.calibration is Calibration.broadcast
        dtype = choose_dtype(config.dtype, device)
        mlp = "replicated" if whole else faster_mlp(model, group, device, dtype, _rows_fed(config, pipeline))
    calibration: Any = str(config.calibration)
    return LayerLayout(layer_partition(config, model), group.size, mlp, calibration)


def _rows_fed(config: ModelDrafterConfig, pipeline: str) -> int:
    """Rows of one request in most fuzzy passes."""
    if pipeline in (PipelineName.branches, PipelineName.tree):
        return config.ahead_width
    return min(config.num_draft_tokens, prod(config.branching)) if config.branching else config.widest
