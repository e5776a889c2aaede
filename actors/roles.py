"""What one rank does from start to end: take its device, join its group, load its part, answer its records.

The same function runs as a thread of one process, as a process, or inside a Ray actor. It knows how to build each
role from the user's options and leaves every decision to the role itself.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from actors.drafter import DraftRole
from actors.drafters import build_drafter, build_levels
from actors.drafters.remote import Mailbox, RemoteLevel
from actors.levels import CascadeDrafterConfig, level_roles
from actors.lifecycle import Failure, Ready, Stop
from actors.logs import logger_of, tell
from actors.messages import VerifyBatch
from actors.options import DrafterConfig, SchedulerConfig, TargetConfig, VerifyConfig
from actors.target import TargetRole
from actors.wire import Link
from parallel.mesh import Group
from parallel.rendezvous import connect_store, join
from parallel.runner import open_model
from parallel.sizing import fit_slots

SWITCH_INTERVAL_S = 5e-4
"""Python's default of 5 ms lets one busy thread delay a waiting one by a whole draft pass."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank's orders. `cores` empty leaves the affinity alone; `size` is the number of ranks of the role."""

    role: str
    rank: int
    size: int
    epoch: int
    device: str
    num_threads: int
    cores: tuple[int, ...]
    hub_address: str
    store: tuple[str, int] | None
    host: str
    eos_token_ids: tuple[int, ...]
    target: TargetConfig
    drafter: DrafterConfig
    verify: VerifyConfig
    pipeline: str
    scheduler: SchedulerConfig

    @property
    def identity(self) -> str:
        return f"{self.role}-{self.rank}"


def serve(spec: RankSpec, observe: Callable[[str], None] | None = None) -> None:
    """Serve one rank until `Stop`. A failure is told to the hub in one line and raised again."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    torch.set_num_threads(max(1, spec.num_threads))
    logger = logger_of(spec.identity)
    tell(logger, "starting", epoch=spec.epoch, size=spec.size, device=spec.device, cores=spec.cores)
    link = Mailbox(Link(spec.hub_address, spec.identity))
    group: Group | None = None
    try:
        group = _join(spec)
        role, facts = build_role(spec, group, link)
        link.send(Ready(spec.role, spec.rank, facts))
        tell(logger, "ready", epoch=spec.epoch, **facts)
        while not isinstance(batch := _next_record(link, role, group, spec.device), Stop):
            for answer in role.answer(batch):
                if spec.rank == 0:
                    link.send(answer)
            if observe is not None:
                observe(f"round {batch.round}")
            if logger.isEnabledFor(logging.INFO):
                _tell_of(batch, logger)
        tell(logger, "stopped", why=batch.reason)
    except Exception as error:
        logger.exception("failed", extra={"facts": {"epoch": spec.epoch}})
        link.send(Failure.of(spec.role, spec.rank, error))
        raise
    finally:
        link.close()
        if group is not None:
            group.close()


def _tell_of(batch: Any, logger: logging.Logger) -> None:
    for admit in batch.admits:
        tell(logger, "admit", request=admit.request_id, epoch=admit.epoch, tokens=len(admit.token_ids))
    if logger.isEnabledFor(logging.DEBUG):
        requests = [one.request_id for one in (batch.items if isinstance(batch, VerifyBatch) else batch.orders)]
        tell(logger, "round", level=logging.DEBUG, round=batch.round, requests=requests, released=batch.releases)


def _next_record(link: Mailbox, role: Any, group: Group, device: str) -> Any:
    """The next record; until it arrives the role may work. All ranks of a group take the same number of steps."""
    while role.wants_work:
        record = link.receive(timeout_s=0) if group.rank == 0 else None
        arrived = group.broadcast(torch.tensor([record is not None], dtype=torch.int64, device=device))
        if arrived.item():
            return record if record is not None else link.receive()
        role.work()
    return link.receive()


def _join(spec: RankSpec) -> Group:
    device = torch.device(spec.device)
    store = connect_store(*spec.store) if spec.store and spec.size > 1 else None
    return join(store, spec.role, spec.epoch, spec.rank, spec.size, device, host=spec.host)


def build_role(spec: RankSpec, group: Group, mailbox: Mailbox | None = None) -> tuple[Any, dict[str, object]]:
    """The role object of this rank and the facts it reports. Only levels of a cascade need a mailbox."""
    started = time.monotonic()
    role, facts = _build_target(spec, group) if spec.role == "target" else _build_draft(spec, group, mailbox)
    place = {"pid": os.getpid(), "device": spec.device, "cores": list(spec.cores)}
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
    tell(logger_of(spec.identity), "sized", **fit.facts())  # before a weight is read
    runner = open_model(config.path, group, spec.device, fit.dtype, fit.num_slots, stretch=config.stretch)
    role = TargetRole(runner, spec.verify.rule, spec.eos_token_ids, is_lead=spec.rank == 0)
    return role, {"vocab_size": runner.config.vocab_size, **fit.facts()}


def _build_draft(spec: RankSpec, group: Group, mailbox: Mailbox | None) -> tuple[DraftRole, dict[str, object]]:
    options = spec.verify, spec.pipeline, spec.scheduler, group, spec.device, spec.eos_token_ids
    if isinstance(spec.drafter, CascadeDrafterConfig):
        levels = level_roles(spec.drafter)[spec.role]
        beneath = RemoteLevel(mailbox, is_lead=spec.rank == 0) if levels[0] else None
        drafter, facts = build_levels(spec.drafter, levels, *options, beneath)
    else:
        drafter, facts = build_drafter(spec.drafter, *options)
    return DraftRole(drafter), facts
