"""One rank from its `RankSpec`: set up the process, connect to the hub, build the role, and run `RankLoop`.

The same function runs as a thread, as a process, or inside a Ray actor. What builds a role is loaded for that role
alone (`target_rank.py`, `diffusion_rank.py`).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from actors.heap import freeze_libraries
from actors.logs import log_event, logger_of
from actors.protocol.membership import Join
from actors.topology import parent_role
from actors.transport.channel import heart_of, link_name, open_link
from actors.worker import openmp
from actors.worker.heartbeat import Heartbeat
from actors.worker.rank_loop import RankLoop, RankRole
from actors.worker.spec import RankSpec
from parallel.comm.group import SINGLE, Group
from parallel.kernels import library
from parallel.runtime.device import use_device

if TYPE_CHECKING:
    from actors.roles.bridge import BridgeEnd, FeatureSender
    from actors.transport.mailbox import Mailbox

SWITCH_INTERVAL_S = 5e-4
"""Python's switch interval; with its default of 5 ms one busy thread delays another by a whole draft pass."""

MEETING_S = 5.0
"""Limit for forming a process group: every rank that gets a `Join`, and the host of the store, answers or is dead."""
NCCL_MEETING_S = 25.0
"""The same for NCCL, which looks for the ways between all GPUs of all ranks meanwhile. A rank in a meeting cannot be
recalled, so this is less than the time after which one that ignores its recall is killed (`RECALL_LIMIT_S`)."""


def serve(
    spec: RankSpec, observe: Callable[[str], None] = lambda _: None, cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Serve one rank until `Stop`, or until `cancelled`, called before each record and twice a second, returns True."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    freeze_libraries()
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    openmp.set_num_threads(max(1, spec.num_threads))
    use_device(spec.device)
    logger = logger_of(spec.identity)
    log_event(logger, "starting", incarnation=spec.incarnation, size=spec.size, device=spec.device, cores=spec.cores)
    assert spec.key is not None
    name = link_name(spec.identity, spec.incarnation)
    link = open_link(spec.hub_address, name, spec.key, folder=spec.folder)
    mailbox: Mailbox | None = None
    if spec.role in map(parent_role, spec.drafter.roles()):
        from actors.transport.mailbox import Mailbox  # for levels of a cascade above another

        mailbox = Mailbox(link)
    bridge = _bridge_end(spec, logger)

    def build(spec: RankSpec, group: Group) -> tuple[RankRole, dict[str, object]]:
        return build_role(spec, group, mailbox, bridge)

    loop = _loop_type(spec.role)(spec, mailbox or link, _join_group, build, observe, cancelled, bridge)
    heart = open_link(spec.hub_address, heart_of(name), spec.key, keeps="newest")
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


def _loop_type(role: str) -> type[RankLoop[Any]]:
    if role == "target":
        return RankLoop
    from actors.worker.draft_rank_loop import DraftRankLoop  # for ranks that draft alone

    return DraftRankLoop


def _bridge_end(spec: RankSpec, logger: logging.Logger) -> BridgeEnd | None:
    """This rank's, if the drafter is sent the target's hidden states."""
    if not spec.drafter.is_bridged(spec.pipeline) or (spec.role == "target" and spec.rank):
        return None
    from actors.roles.bridge import FeatureReceiver, FeatureSender

    end = FeatureSender if spec.role == "target" else FeatureReceiver
    return end(spec.host, spec.device, logger)


def _join_group(spec: RankSpec, order: Join) -> Group:
    if spec.size == 1:
        return SINGLE
    from parallel.comm.rendezvous import connect_store, join  # for roles of several ranks alone

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
    role, facts = _role_of(spec, group, mailbox, bridge)
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


def _role_of(
    spec: RankSpec, group: Group, mailbox: Mailbox | None, bridge: BridgeEnd | None
) -> tuple[RankRole, dict[str, object]]:
    if spec.role == "target":
        from parallel.model.checkpoint import resolve_checkpoint
        from parallel.model.families.registry import read_config

        if (model := read_config(resolve_checkpoint(spec.target.path))).diffusion is not None:
            from actors.worker.diffusion_rank import build_diffusion_target

            return build_diffusion_target(spec, group, model)
        from actors.worker.target_rank import build_target

        return build_target(spec, group, cast("FeatureSender | None", bridge))
    from actors.roles.draft import DraftRole  # for ranks that draft alone

    setup = replace(spec.draft_setup(group), role=spec.role, mailbox=mailbox)
    drafter, facts = spec.drafter.build(setup)
    return DraftRole(drafter, adapts=spec.adaptive, rebuild=spec.drafter.rebuilder(setup)), facts
