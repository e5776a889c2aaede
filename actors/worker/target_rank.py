"""The target role of one rank, from its `RankSpec`: the model, its KV slots, and what a drafter adds to its passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.drafters.interface import Drafter
from actors.grammars.compiler import GrammarCompiler
from actors.grammars.masks import GrammarMasks
from actors.logs import log_event, logger_of
from actors.options import PipelineName
from actors.roles.bridge import BridgeEnd, FeatureSender
from actors.roles.target import TargetRole
from actors.tokenizer_file import open_tokenizer
from actors.worker.draft_rank import device_share, draft_setup
from actors.worker.spec import RankSpec
from parallel.comm.group import Group
from parallel.model.checkpoint import resolve_checkpoint
from parallel.model.families.registry import read_config
from parallel.runtime.graph_list import GraphList, graph_shapes
from parallel.runtime.kv_sizing import fit_slots
from parallel.runtime.runner import captured_facts, open_model
from parallel.speculators.config import FINAL

if TYPE_CHECKING:
    from actors.roles.attached import AttachedDrafter
    from actors.verification.features import FeatureReader
    from actors.verification.top_tokens import TopTokensReader
    from parallel.kv.pool import KVPool


def build_target(spec: RankSpec, group: Group, bridge: BridgeEnd | None) -> tuple[TargetRole, dict[str, object]]:
    """The role and what it measured; one that sends hidden states needs its end of the `bridge`."""
    config = spec.target
    top_k = spec.drafter.target_top_k if spec.pipeline != PipelineName.plain else 0
    reads_prompts = top_k > 0 and spec.drafter.reads_prompts
    speculates = spec.pipeline != PipelineName.plain
    most_rows = 1 + spec.drafter.num_draft_tokens * speculates
    graphs = GraphList(graph_shapes(spec.scheduler.max_num_seqs, most_rows, spec.scheduler.max_num_batched_tokens))
    is_attached = spec.drafter.is_attached(spec.pipeline)
    held, per_slot = (0, 0)
    if is_attached:
        held, per_slot = spec.drafter.memory_beside(config, group.size, spec.device, spec.scheduler)
    fit = fit_slots(
        config.path,
        group,
        spec.device,
        config.dtype,
        stretch=config.stretch,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        max_model_len=config.max_model_len,
        num_slots=config.kv_slots,
        invariant=config.is_invariant,
        max_num_seqs=spec.scheduler.max_num_seqs,
        num_logit_rows=spec.scheduler.max_num_batched_tokens if reads_prompts else 0,
        max_num_batched_tokens=spec.scheduler.max_num_batched_tokens,
        graphs=graphs,
        sharing=device_share(spec),
        beside=(held, per_slot + _kept_bytes(spec)),
    )
    sizes: dict[str, Any] = fit.facts()
    log_event(logger_of(spec.identity), "sized", **sizes)  # before weights are loaded
    model = fit.dtype, fit.num_slots, config.stretch
    options: dict[str, Any] = {"weights": fit.weights, "kv_dtype": fit.kv_dtype, "backend": config.attention}
    runner = open_model(spec.served.path, group, spec.device, *model, invariant=config.is_invariant, **options)
    log_event(
        logger_of(spec.identity),
        "attention",
        backend=runner.attention,
        kv_dtype=sizes["kv_dtype"],
        numerics=config.numerics,
    )
    if spec.pipeline != PipelineName.plain:
        runner = spec.drafter.on_target(runner)
    is_lead = spec.rank == 0
    reader = _top_tokens(spec, top_k, reads_prompts=reads_prompts) if top_k else None
    after, features, facts = None, None, dict[str, object](drafters=[*spec.drafter.names_in(spec.pipeline)])
    if is_attached:
        setup = replace(draft_setup(spec, group), target_runner=runner)
        drafter, facts["drafter"] = spec.drafter.build(setup)
        after = _attached(drafter, group, spec.device)
    # on every rank, since each has heads of its own; a bridge has its end on the lead alone
    if (is_attached and spec.drafter.reads_features) or spec.drafter.is_bridged(spec.pipeline):
        num_layers = runner.config.num_layers - config.stretch
        pool = runner.pool if spec.scheduler.prefix_cache else None
        features = _features(spec.drafter.taps(num_layers), pool)
        if isinstance(bridge, FeatureSender):
            after = bridge
            bridge.fuser = spec.drafter.open_fuser(num_layers, spec.device)
    if config.all_reduce == "symmetric":
        sizes["all_reduce"] = "nccl" if group.is_abortable else "symmetric"
    role = TargetRole(
        runner,
        spec.verify.rule,
        spec.eos_token_ids,
        is_lead=is_lead,
        top_tokens=reader,
        features=features,
        drafter=after,
        grammars=_grammars(spec) if is_lead else None,
        weights=spec.served,
    )
    head, taps = runner.decoder.lm_head, () if features is None else features.streams
    with head.ungathered() if role.splits_choice else nullcontext():
        sizes |= captured_facts(runner, graphs, taps)
    if config.pace_ms:
        from parallel.runtime.pacing import pace

        pace(role.runner, config.pace_ms)
    if (encoder := runner.config.encoder) is not None:
        from actors.sampling.checkpoint_defaults import read_defaults

        start = list(runner.config.text_start)
        facts |= {"max_source_len": encoder.max_positions, "text_start": start}
        facts["sampling"] = read_defaults(resolve_checkpoint(config.path), len(start))
    sizes["pass_bytes"] = runner.decoder.pass_bytes()
    checkpoint = str(Path(config.path).absolute())
    return role, {"checkpoint": checkpoint, "vocab_size": runner.config.vocab_size, **sizes, **facts}


def _grammars(spec: RankSpec) -> GrammarMasks:
    """Nothing is read before the first grammar."""
    checkpoint = Path(spec.target.path)
    return GrammarMasks(GrammarCompiler(lambda: open_tokenizer(checkpoint).to_str(), spec.eos_token_ids))


def _kept_bytes(spec: RankSpec) -> int:
    """Bytes for each KV slot, at most, of the hidden states that are kept beside it for a drafter."""
    if not (spec.scheduler.prefix_cache and spec.drafter.reads_features and spec.pipeline != PipelineName.plain):
        return 0
    config = read_config(resolve_checkpoint(spec.target.path))
    taps = {tap for tap in spec.drafter.taps(config.num_layers) if tap >= FINAL}
    return len(taps) * config.hidden_size * 4


def _attached(drafter: Drafter, group: Group, device: str) -> AttachedDrafter:
    from actors.roles.attached import AttachedDrafter  # for drafters on the target's ranks alone

    return AttachedDrafter(drafter, group, device)


def _top_tokens(spec: RankSpec, k: int, *, reads_prompts: bool) -> TopTokensReader:
    from actors.verification.top_tokens import TopTokensReader  # for drafters that learn from them alone

    return TopTokensReader(k, reads_prompts=reads_prompts, is_lead=spec.rank == 0, is_late=spec.drafter.learns_later)


def _features(taps: Sequence[int], pool: KVPool | None) -> FeatureReader:
    from actors.verification.features import FeatureReader  # for drafters that read hidden states alone

    return FeatureReader(taps, pool)
