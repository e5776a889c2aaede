"""The target role of one rank, from its `RankSpec`: the model, its KV slots, and what a drafter adds to its passes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.logs import log_event, logger_of
from actors.options import PipelineName
from actors.roles.target import TargetRole
from actors.tokenizer_file import open_tokenizer
from actors.worker.spec import RankSpec
from parallel.comm.group import Group
from parallel.model.checkpoint import resolve_checkpoint
from parallel.model.families.registry import read_config
from parallel.runtime.graph_list import GraphList, graph_shapes
from parallel.runtime.kv_sizing import ModelMemory, fit_slots
from parallel.runtime.runner import ModelRunner, captured_facts, open_model

if TYPE_CHECKING:
    from actors.grammars.masks import GrammarMasks
    from actors.roles.after_verdicts import AfterVerdicts
    from actors.roles.bridge import FeatureSender
    from actors.roles.run_ahead import RunAhead
    from actors.verification.features import FeatureReader
    from actors.verification.top_tokens import TopTokensReader
    from parallel.runtime.decoder_runner import DecoderRunner


def build_target(spec: RankSpec, group: Group, bridge: FeatureSender | None) -> tuple[TargetRole, dict[str, object]]:
    """The role and what it measured; one that sends hidden states needs its end of the `bridge`."""
    config, scheduler, is_lead = spec.target, spec.scheduler, spec.rank == 0
    speculates, is_attached = spec.pipeline != PipelineName.plain, spec.drafter.is_attached(spec.pipeline)
    top_k = spec.drafter.target_top_k if speculates else 0
    reads_prompts = top_k > 0 and spec.drafter.reads_prompts
    most_rows = 1 + spec.drafter.num_draft_tokens * speculates
    graphs = GraphList(graph_shapes(scheduler.max_num_seqs, most_rows, scheduler.max_num_batched_tokens))
    held, per_slot = (0, 0)
    if is_attached:
        held, per_slot = spec.drafter.memory_beside(config, group.size, spec.device, scheduler)
    memory = fit_target(
        spec,
        group,
        num_slots=config.kv_slots,
        num_logit_rows=scheduler.max_num_batched_tokens if reads_prompts else 0,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        graphs=graphs,
        beside=(held, per_slot + _kept_bytes(spec)),
    )
    sizes = memory.facts()
    runner: DecoderRunner = load_target(spec, group, memory, sizes)
    if speculates:
        runner = spec.drafter.on_target(runner)
    after: AfterVerdicts | None = None
    features: FeatureReader | None = None
    top_tokens: TopTokensReader | None = None
    facts = dict[str, object](drafters=[*spec.drafter.names_in(spec.pipeline)])
    if top_k:
        from actors.verification.top_tokens import TopTokensReader  # for drafters that learn from them alone

        is_late = spec.drafter.learns_later
        top_tokens = TopTokensReader(top_k, reads_prompts=reads_prompts, is_lead=is_lead, is_late=is_late)
    if is_attached:
        from actors.roles.attached import AttachedDrafter  # for drafters on the target's ranks alone

        setup = replace(spec.draft_setup(group), target_runner=runner)
        drafter, facts["drafter"] = spec.drafter.build(setup)
        after = AttachedDrafter(drafter, group, spec.device, spec.drafter.rebuilder(setup))
    # on every rank, since each has heads of its own; a bridge has its end on the lead alone
    if (is_attached and spec.drafter.reads_features) or spec.drafter.is_bridged(spec.pipeline):
        from actors.verification.features import FeatureReader  # for drafters that read hidden states alone

        num_layers = runner.config.num_layers - config.stretch
        features = FeatureReader(spec.drafter.taps(num_layers), runner.pool if scheduler.prefix_cache else None)
        if bridge is not None:
            after = bridge
            bridge.fuser = spec.drafter.open_fuser(num_layers, spec.device)
    if config.all_reduce == "symmetric":
        sizes["all_reduce"] = "nccl" if group.is_abortable else "symmetric"
    role = TargetRole(
        runner,
        spec.verify.rule,
        spec.eos_token_ids,
        is_lead=is_lead,
        top_tokens=top_tokens,
        features=features,
        drafter=after,
        grammars=partial(_grammars, spec) if is_lead else None,
        weights=spec.served,
        ahead=_open_ahead(spec, memory, features),
    )
    head, taps = runner.decoder.lm_head, () if features is None else features.streams
    with head.ungathered() if role.splits_choice else nullcontext():
        sizes |= captured_facts(runner, graphs, taps)
    if (encoder := runner.config.encoder) is not None:
        from actors.sampling.checkpoint_defaults import read_defaults

        start = list(runner.config.text_start)
        facts |= {"max_source_len": encoder.max_positions, "text_start": start}
        facts["sampling"] = read_defaults(resolve_checkpoint(config.path), len(start))
    return role, finish_target(spec, role.runner) | sizes | facts


# --- what every kind of target is made of -----------------------------------------------------------------------------


def fit_target(spec: RankSpec, group: Group, **options: Any) -> ModelMemory:
    """The sizes of the target's model on this rank; `options` are further ones of `fit_slots`."""
    config = spec.target
    return fit_slots(
        config.path,
        group,
        spec.device,
        config.dtype,
        stretch=config.stretch,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        max_model_len=config.max_model_len,
        invariant=config.is_invariant,
        max_num_seqs=spec.scheduler.max_num_seqs,
        sharing=spec.device_share,
        **options,
    )


def load_target(
    spec: RankSpec, group: Group, memory: ModelMemory, sizes: dict[str, Any], **options: Any
) -> ModelRunner:
    """The target's model in this memory; `sizes` are logged before its weights are loaded, and `options` are the
    runner's."""
    config = spec.target
    log_event(logger_of(spec.identity), "sized", **sizes)
    runner = open_model(
        spec.served.path,
        group,
        spec.device,
        memory.dtype,
        memory.num_slots,
        config.stretch,
        weights=memory.weights,
        kv_dtype=memory.kv_dtype,
        backend=config.attention,
        invariant=config.is_invariant,
        **options,
    )
    log_event(
        logger_of(spec.identity),
        "attention",
        backend=runner.attention,
        kv_dtype=sizes["kv_dtype"],
        numerics=config.numerics,
    )
    return runner


def finish_target(spec: RankSpec, runner: DecoderRunner) -> dict[str, object]:
    """Slow the passes down if they are to take a given time, and return what the role reports of its model."""
    if spec.target.pace_ms:
        from parallel.runtime.pacing import pace

        pace(runner, spec.target.pace_ms)
    return {
        "checkpoint": str(Path(spec.target.path).absolute()),
        "vocab_size": runner.config.vocab_size,
        "pass_bytes": runner.decoder.pass_bytes(),
    }


# --- parts that few targets need --------------------------------------------------------------------------------------


def _grammars(spec: RankSpec) -> GrammarMasks:
    from actors.grammars.compiler import GrammarCompiler
    from actors.grammars.masks import GrammarMasks

    checkpoint = Path(spec.target.path)
    return GrammarMasks(GrammarCompiler(lambda: open_tokenizer(checkpoint).to_str(), spec.eos_token_ids))


def _open_ahead(spec: RankSpec, memory: ModelMemory, features: FeatureReader | None) -> RunAhead | None:
    """None but for a rank that drafts and waits for records of another process. Several would have to agree on what
    they predict, and a thread of the coordinator's process has its next batch as soon as it has sent an answer."""
    if not spec.drafter.is_attached(spec.pipeline) or spec.size > 1 or spec.is_thread:
        return None
    from actors.roles.run_ahead import RunAhead

    has_streams = features is not None and features.has_streams
    return RunAhead(spec.eos_token_ids, memory.max_model_len, has_streams=has_streams)


def _kept_bytes(spec: RankSpec) -> int:
    """Bytes for each KV slot, at most, of the hidden states that are kept beside it for a drafter."""
    if not (spec.scheduler.prefix_cache and spec.drafter.reads_features and spec.pipeline != PipelineName.plain):
        return 0
    from actors.verification.features import kept_bytes

    config = read_config(resolve_checkpoint(spec.target.path))
    return kept_bytes(spec.drafter.taps(config.num_layers), config.hidden_size)
