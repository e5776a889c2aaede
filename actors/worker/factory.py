"""One rank from its orders: take the device, open the line, and live the life of `rank.py` with a role built here.

The same function runs as a thread of one process, as a process, or inside a Ray actor. It knows how to build each
role from the user's options and leaves every decision to the role itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actors.drafters.cascade.build import build_levels
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.cascade.remote_child import Mailbox, RemoteChild
from actors.drafters.config import DraftSetup
from actors.protocol.membership import Join
from actors.roles.draft import DraftRole
from actors.roles.target import TargetRole
from actors.topology import level_roles
from actors.transport.channel import Link, link_name
from actors.worker import openmp
from actors.worker.logs import log_event, logger_of
from actors.worker.rank_loop import Heartbeat, Rank, RankStatus
from actors.worker.spec import RankSpec
from parallel.comm.group import Group
from parallel.comm.rendezvous import connect_store, join
from parallel.runtime.kv_sizing import fit_slots
from parallel.runtime.runner import open_model

SWITCH_INTERVAL_S = 5e-4
"""Python's default of 5 ms lets one busy thread delay a waiting one by a whole draft pass."""

MEETING_S = 5.0
"""Whoever is called to a meeting is there, or dead, the store's host too: nobody need be waited for longer."""


def serve(
    spec: RankSpec,
    observe: Callable[[str], None] = lambda status: None,
    unwanted: Callable[[], bool] = lambda: False,
) -> None:
    """Serve one rank until `Stop`, or until it is `unwanted`, which it asks now and then."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    torch.set_num_threads(max(1, spec.num_threads))
    logger = logger_of(spec.identity)
    log_event(logger, "starting", incarnation=spec.incarnation, size=spec.size, device=spec.device, cores=spec.cores)
    name = link_name(spec.identity, spec.incarnation)
    link = Mailbox(Link(spec.hub_address, name))
    status = RankStatus(spec.role, spec.rank, spec.incarnation, os.getpid())
    heart = Heartbeat(lambda: Link(spec.hub_address, f"{name}/heart", keeps="newest"), status)
    rank = Rank(
        link,
        status,
        lambda call: _meet(spec, call),
        lambda group: build_role(spec, group, link),
        spec.device,
        observe=observe,
        unwanted=unwanted,
    )
    try:
        rank.serve()
        log_event(logger, "stopped")
    except Exception:
        logger.exception("failed", extra={"facts": {"incarnation": spec.incarnation}})
        raise
    finally:
        heart.stop()
        link.close()


def _meet(spec: RankSpec, call: Join) -> Group:
    store = connect_store(*call.store, timeout_s=MEETING_S / 2) if spec.size > 1 else None  # it asks twice
    return join(
        store,
        spec.role,
        call.epoch,
        spec.rank,
        spec.size,
        torch.device(spec.device),
        host=spec.host,
        meeting_s=MEETING_S,
    )


def build_role(spec: RankSpec, group: Group, mailbox: Mailbox | None = None) -> tuple[Any, dict[str, object]]:
    """The role object of this rank and the facts it reports; a level above another needs its `mailbox`."""
    started = time.monotonic()
    role, facts = _build_target(spec, group) if spec.role == "target" else _build_draft(spec, group, mailbox)
    place = {"pid": os.getpid(), "device": spec.device, "cores": list(spec.cores), "openmp": openmp.in_effect()}
    return role, {**place, "load_s": time.monotonic() - started, **facts}


def _build_target(spec: RankSpec, group: Group) -> tuple[TargetRole, dict[str, object]]:
    config = spec.target
    fit = fit_slots(
        config.path,
        group,
        spec.device,
        config.dtype,
        stretch=config.stretch,
        max_model_len=config.max_model_len,
        num_slots=config.kv_slots,
        max_num_seqs=spec.scheduler.max_num_seqs,
    )
    log_event(logger_of(spec.identity), "sized", **fit.facts())  # before a weight is read
    runner = open_model(config.path, group, spec.device, fit.dtype, fit.num_slots, stretch=config.stretch)
    role = TargetRole(runner, spec.verify.rule, spec.eos_token_ids, is_lead=spec.rank == 0)
    checkpoint = str(Path(config.path).absolute())
    return role, {"checkpoint": checkpoint, "vocab_size": runner.config.vocab_size, **fit.facts()}


def _build_draft(spec: RankSpec, group: Group, mailbox: Mailbox | None) -> tuple[DraftRole, dict[str, object]]:
    setup = DraftSetup(spec.verify, spec.pipeline, spec.scheduler, group, spec.device, spec.eos_token_ids)
    if isinstance(spec.drafter, CascadeDrafterConfig):
        levels = level_roles(spec.drafter)[spec.role]
        beneath = RemoteChild(mailbox, group, spec.device) if levels[0] else None
        drafter, facts = build_levels(spec.drafter, levels, setup, beneath)
    else:
        drafter, facts = spec.drafter.build(setup)
    return DraftRole(drafter, adapts=spec.adaptive), facts
