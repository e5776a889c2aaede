"""One rank from its `RankSpec`: set up the process, connect to the hub, build the role, and run `RankLoop`.

The same function runs as a thread, as a process, or inside a Ray actor. It knows how to build each role from the user's
options; every decision is the role's.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from actors.drafters.cascade.build import build_levels
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.cascade.remote_child import Mailbox, RemoteChild
from actors.drafters.config import DraftSetup
from actors.logs import log_event, logger_of
from actors.options import PipelineName
from actors.protocol.membership import Join
from actors.roles.attached import AttachedDrafter
from actors.roles.bridge import BridgeEnd, FeatureReceiver, FeatureSender
from actors.roles.draft import DraftRole
from actors.roles.target import TargetRole
from actors.topology import level_roles
from actors.transport.channel import Link, heart_of, link_name
from actors.verification.features import FeatureReader
from actors.verification.top_tokens import TopTokensReader
from actors.worker import openmp
from actors.worker.heartbeat import Heartbeat
from actors.worker.rank_loop import RankLoop, RankRole
from actors.worker.spec import RankSpec
from parallel.comm.group import Group
from parallel.comm.rendezvous import connect_store, join
from parallel.kernels import library
from parallel.runtime.device import use_device
from parallel.runtime.graph_list import GraphList, graph_shapes
from parallel.runtime.kv_sizing import DeviceShare, fit_slots
from parallel.runtime.runner import captured_facts, open_model

SWITCH_INTERVAL_S = 5e-4
"""With Python's default of 5 ms one busy thread delays another by a whole draft pass."""

MEETING_S = 5.0
"""Limit for forming a process group: every rank that gets a `Join`, and the host of the store, answers or is dead."""
NCCL_MEETING_S = 60.0
"""The same for NCCL, which looks for the ways between all GPUs of all ranks meanwhile."""


def serve(
    spec: RankSpec, observe: Callable[[str], None] = lambda _: None, cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Serve one rank until `Stop`, or until `cancelled`, which is called about twice a second, returns True."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    openmp.set_num_threads(max(1, spec.num_threads))
    use_device(spec.device)
    logger = logger_of(spec.identity)
    log_event(logger, "starting", incarnation=spec.incarnation, size=spec.size, device=spec.device, cores=spec.cores)
    assert spec.key is not None
    name = link_name(spec.identity, spec.incarnation)
    link = Mailbox(Link(spec.hub_address, name, spec.key))
    bridge = _bridge_end(spec, logger)

    def build(spec: RankSpec, group: Group, mailbox: Mailbox) -> tuple[RankRole, dict[str, object]]:
        return build_role(spec, group, mailbox, bridge)

    loop = RankLoop(spec, link, _join_group, build, observe, cancelled, bridge)
    heart = Link(spec.hub_address, heart_of(name), spec.key, keeps="newest")
    heartbeat = Heartbeat(heart, loop.heartbeat, loop.interrupt)
    try:
        loop.serve()
        log_event(logger, "stopped")
    except Exception:
        logger.exception("failed", extra={"facts": {"incarnation": spec.incarnation}})
        raise
    finally:
        heartbeat.stop()
        link.close()


def _bridge_end(spec: RankSpec, logger: logging.Logger) -> BridgeEnd | None:
    """This rank's, if the drafter is sent the target's hidden states."""
    if not spec.drafter.is_bridged(spec.pipeline) or (spec.role == "target" and spec.rank):
        return None
    end = FeatureSender if spec.role == "target" else FeatureReceiver
    return end(spec.host, spec.device, logger)


def _join_group(spec: RankSpec, order: Join) -> Group:
    store = None
    if spec.size > 1:
        assert order.store is not None
        store = connect_store(*order.store, timeout_s=MEETING_S / 2)  # it tries twice
    device = torch.device(spec.device)
    meeting_s = NCCL_MEETING_S if device.type == "cuda" else MEETING_S
    place = spec.role, order.epoch, spec.rank, spec.size, device
    symmetric = spec.role == "target" and spec.target.all_reduce == "symmetric"
    return join(store, *place, host=spec.host, meeting_s=meeting_s, symmetric=symmetric)


def build_role(
    spec: RankSpec, group: Group, mailbox: Mailbox | None = None, bridge: BridgeEnd | None = None
) -> tuple[RankRole, dict[str, object]]:
    """The role of this rank and what it measured.

    A cascade level with a remote child needs the `mailbox`, a target that sends hidden states its end of the `bridge`.
    """
    started = time.monotonic()
    role, facts = _build_target(spec, group, bridge) if spec.role == "target" else _build_draft(spec, group, mailbox)
    process = {
        "pid": os.getpid(),
        "device": spec.device,
        "cores": list(spec.cores),
        "num_threads": torch.get_num_threads(),
        "openmp": openmp.in_effect(),
    }
    if why := library.obstacle():
        process["no_kernels"] = why
    if spec.device.startswith("cuda"):
        process["gpu"] = str(torch.cuda.get_device_properties(spec.device).uuid)
    return role, {**process, "load_s": time.monotonic() - started, **facts}


def _build_target(spec: RankSpec, group: Group, bridge: BridgeEnd | None) -> tuple[TargetRole, dict[str, object]]:
    config = spec.target
    top_k = spec.drafter.target_top_k if spec.pipeline != PipelineName.plain else 0
    reads_prompts = top_k > 0 and spec.drafter.reads_prompts
    speculates = spec.pipeline != PipelineName.plain
    most_rows = 1 + spec.drafter.num_draft_tokens * speculates
    graphs = GraphList(graph_shapes(spec.scheduler.max_num_seqs, most_rows, spec.scheduler.max_num_batched_tokens))
    is_attached = spec.drafter.is_attached(spec.pipeline)
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
        max_num_seqs=spec.scheduler.max_num_seqs,
        num_logit_rows=spec.scheduler.max_num_batched_tokens if reads_prompts else 0,
        max_num_batched_tokens=spec.scheduler.max_num_batched_tokens,
        graphs=graphs,
        sharing=_sharing(spec),
        beside=spec.drafter.memory_beside(config, group.size, spec.device) if is_attached else (0, 0),
    )
    sizes: dict[str, Any] = fit.facts()
    log_event(logger_of(spec.identity), "sized", **sizes)  # before weights are loaded
    model = fit.dtype, fit.num_slots, config.stretch
    options: dict[str, Any] = {"weights": fit.weights, "kv_dtype": fit.kv_dtype, "backend": config.attention}
    runner = open_model(config.path, group, spec.device, *model, **options)
    log_event(logger_of(spec.identity), "attention", backend=runner.attention, kv_dtype=sizes["kv_dtype"])
    if spec.pipeline != PipelineName.plain:
        runner = spec.drafter.on_target(runner)
    is_lead = spec.rank == 0
    reader = TopTokensReader.of(top_k, reads_prompts=reads_prompts, is_lead=is_lead, is_late=spec.drafter.learns_later)
    attached, features, facts = None, None, {}
    if is_attached:
        setup = replace(_setup(spec, group), target_runner=runner)
        drafter, facts["drafter"] = spec.drafter.build(setup)
        attached = AttachedDrafter(drafter, group, spec.device)
    # on every rank, since each has heads of its own; a bridge has its end on the lead alone
    if (attached is not None and spec.drafter.reads_features) or spec.drafter.is_bridged(spec.pipeline):
        num_layers = runner.config.num_layers - config.stretch
        features = FeatureReader(spec.drafter.taps(num_layers))
        if isinstance(bridge, FeatureSender):
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
        attached=attached,
        sender=bridge if isinstance(bridge, FeatureSender) else None,
    )
    head, taps = runner.decoder.lm_head, () if features is None else features.streams
    with head.ungathered() if role.splits_choice else nullcontext():
        sizes |= captured_facts(runner, graphs, taps)
    checkpoint = str(Path(config.path).absolute())
    return role, {"checkpoint": checkpoint, "vocab_size": runner.config.vocab_size, **sizes, **facts}


def _build_draft(spec: RankSpec, group: Group, mailbox: Mailbox | None) -> tuple[DraftRole, dict[str, object]]:
    setup = _setup(spec, group)
    if isinstance(spec.drafter, CascadeDrafterConfig):
        levels, child = level_roles(spec.drafter)[spec.role], None
        if levels[0]:
            assert mailbox is not None
            child = RemoteChild(mailbox, group, spec.device)
        drafter, facts = build_levels(spec.drafter, levels, setup, child)
    else:
        drafter, facts = spec.drafter.build(setup)
    return DraftRole(drafter, adapts=spec.adaptive), facts


def _sharing(spec: RankSpec) -> DeviceShare | None:
    if spec.memory_part == 1 and not spec.neighbour_bytes:
        return None
    return DeviceShare(spec.neighbour_bytes, spec.memory_part)


def _setup(spec: RankSpec, group: Group) -> DraftSetup:
    return DraftSetup(
        spec.verify,
        spec.pipeline,
        spec.scheduler,
        group,
        spec.device,
        spec.eos_token_ids,
        target=spec.target,
        sharing=_sharing(spec),
    )
