"""A draft pool from its configuration: the drafter, its passes, and the address at which engines order leases.

The Python side of `job=pool`; the engine's side is `cluster/runtime/pool_leases.py`.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Self

import torch

from actors.drafters.interface import Drafter
from actors.drafters.model.config import PassDrafterConfig
from actors.options import VerifyRule
from actors.pool.merged_passes import MergedPasses
from actors.pool.service import PoolLimits, PoolService, PoolSnapshot
from actors.pool.tenant_drafter import SharedDrafter
from actors.protocol.leases import LeaseTerms
from actors.tokenizer_file import tokenizer_digest
from actors.topology import TOP
from actors.transport.channel import Hub
from actors.transport.keys import FIRST_CLIENT, SECRET_BYTES, HubKeys
from actors.worker import openmp
from cluster.config.jobs import PoolConfig
from cluster.config.schema import LaunchConfig
from cluster.io.checkpoints import check_checkpoints
from cluster.io.text import read_eos_token_ids
from cluster.keys import ClientFile
from cluster.observability.report import write_json
from cluster.placement.ranks import Devices, models_of, place_alone
from cluster.runtime.backend import LOOPBACK, rank_spec
from parallel.comm.group import SINGLE
from parallel.runtime.device import use_device
from parallel.whole_files import WriteError, make_folder, write_privately

log = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 2e-4
"""The threads of the leases must not wait for that of the passes."""


class DraftPool:
    """Listens and has loaded its drafter once constructed; `observe` receives a line when leases begin or end. What the
    leases were given so far is in `leases.json` of `run_dir`.

    Raises ValueError, one line, for a drafter that cannot be lent, an address or a file that cannot be used.
    """

    def __init__(self, config: LaunchConfig, run_dir: Path, observe: Callable[[str], None] = lambda _: None) -> None:
        job: PoolConfig = config.job
        check_lendable(config)
        keys = HubKeys(_secret(job))
        self._report = run_dir / "leases.json"
        self._snapshot: PoolSnapshot | None = None
        self._is_unwritten = False
        with ExitStack() as opened:
            self._hub = Hub(f"tcp://{LOOPBACK}:*", keys, client_address=job.listen)
            opened.callback(self._hub.close)
            directory = Path(f"{job.secret_file}.keys").expanduser() if job.secret_file else run_dir / "keys"
            self.clients = ClientFile(directory)
            self.key_file = self.clients.open(keys.of(FIRST_CLIENT))
            if not job.secret_file:
                opened.callback(self.clients.delete)
            if job.metrics_port:
                opened.callback(_open_metrics(job, lambda: self._snapshot))
            self._passes, self._service = _open(config, self._hub, self.clients, observe, self._take_snapshot)
            opened.callback(self._passes.close)
            self._opened = opened.pop_all()

    @property
    def address(self) -> str:
        """The address at which engines order leases: the value of their `drafter.pools`."""
        return self._hub.client_address

    @property
    def num_leases(self) -> int:
        return self._service.num_leases

    def serve(self, cancelled: Callable[[], bool]) -> None:
        """Serves leases until `cancelled()`, which is called a few times a second; all leases have ended then."""
        self._service.serve(cancelled)

    def _take_snapshot(self, snapshot: PoolSnapshot) -> None:
        self._snapshot = snapshot
        try:
            write_json(self._report, asdict(snapshot))
        except WriteError as error:  # a full disk ends no lease
            if not self._is_unwritten:
                log.warning("%s", error)
            self._is_unwritten = True
        else:
            self._is_unwritten = False

    def close(self) -> None:
        """Releases threads and sockets; to be called after `serve` has returned."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_alone(config: LaunchConfig, run_dir: Path, observe: Callable[[str], None]) -> DraftPool:
    """The pool of a process that does nothing else."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    return DraftPool(config, run_dir, observe)


def check_lendable(config: LaunchConfig) -> None:
    """Raise ValueError, one line, for a drafter that a pool cannot lend."""
    drafter, name, pipeline = config.drafter, config.drafter.name, config.pipeline.name
    why = ""
    if name == "none" or drafter.is_elsewhere or pipeline == "plain":
        why = "drafts nothing here; give drafter=model, or a lookup, and the pipeline of the engines"
    elif drafter.reads_features or name == "self":
        why = "reads the target's hidden states, which are not sent to a pool; use drafter=model"
    elif drafter.target_top_k:
        why = "learns from the target's tokens, which engines must not share; use drafter=model"
    elif len(drafter.roles()) > 1 or any(model.ranks > 1 for model in models_of(config, TOP)):
        why = "takes several ranks, and a pool has one"
    elif drafter.is_attached(pipeline):
        why = "is attached to the target's ranks; drop drafter.placement=attached"
    if why:
        raise ValueError(f"drafter={name}: {why}")
    if config.verify.rule != VerifyRule.coupled:
        raise ValueError(f"verify={config.verify.rule}: a pool's drafts are verified by verify=coupled; use that")


def _open_metrics(job: PoolConfig, snapshot: Callable[[], PoolSnapshot | None]) -> Callable[[], None]:
    """Returns what closes them."""
    try:
        from cluster.observability.pool_metrics import MetricsListener
    except ModuleNotFoundError as error:
        line = f"job.metrics_port={job.metrics_port}: needs {error.name}; install it with pip install specdec[serve]"
        raise ValueError(line) from error
    return MetricsListener(job.metrics_host, job.metrics_port, snapshot).close


def _open(
    config: LaunchConfig,
    hub: Hub,
    clients: ClientFile,
    observe: Callable[[str], None],
    watch: Callable[[PoolSnapshot], None],
) -> tuple[MergedPasses, PoolService]:
    job: PoolConfig = config.job
    checkpoint = Path(config.target.path)
    check_checkpoints(checkpoint, config.drafter)
    cores = tuple(sorted(os.sched_getaffinity(0))[: config.cluster.num_cpus])
    place = place_alone(config, Devices(cores, torch.cuda.device_count()))
    spec = rank_spec(config, place, "", LOOPBACK, read_eos_token_ids(checkpoint))
    facts: dict[str, object] = {}

    def build() -> Drafter:
        openmp.set_num_threads(place.num_threads)
        use_device(spec.device)
        drafter, measured = spec.drafter.build(spec.draft_setup(SINGLE))
        facts.update(measured)
        return drafter

    passes = MergedPasses(build)
    kv_slots = int(str(facts["kv_slots"])) if "kv_slots" in facts else None
    ahead_width = config.drafter.ahead_width if isinstance(config.drafter, PassDrafterConfig) else 0
    shared = SharedDrafter(passes, kv_slots, config.scheduler.prefill_chunk, ahead_width)
    streams = config.drafter.name == "model" and passes.drafter.capabilities.sends_previews is not None
    terms = LeaseTerms(str(config.verify.rule), str(config.pipeline.name), tokenizer_digest(checkpoint), streams)
    limits = PoolLimits(
        job.max_leases, job.leases_per_key or job.max_leases, job.lease_s, config.drafter.num_draft_tokens
    )
    return passes, PoolService(hub, spec, terms, limits, shared, clients.read_again, observe, watch)


def _secret(job: PoolConfig) -> bytes:
    """That of the file, which is made where there is none."""
    if not job.secret_file:
        return secrets.token_bytes(SECRET_BYTES)
    file = Path(job.secret_file).expanduser()
    if not file.exists():
        make_folder(file.parent)
        write_privately(file, secrets.token_hex(SECRET_BYTES))
    remedy = "delete it for a new one"
    try:
        secret = bytes.fromhex(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"job.secret_file={file}: cannot be read ({error}); {remedy}") from error
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"job.secret_file={file}: has {len(secret)} bytes, not {SECRET_BYTES}; {remedy}")
    return secret
