"""`job=pool`: lends the drafter to the targets of other engines (`drafter=pool`), until SIGTERM or Ctrl-C.

One process with one drafter on one device; no engine and no target are started. `target.path` names the model of the
engines, for its vocabulary.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from actors.drafters.interface import Drafter
from actors.logs import LogSpec, close_logs, open_logs
from actors.pool.guest_drafter import SharedDrafter
from actors.pool.merged_passes import MergedPasses
from actors.pool.service import PoolLimits, PoolService
from actors.protocol.leases import LeaseTerms
from actors.tokenizer_file import tokenizer_digest
from actors.transport.channel import Hub
from actors.transport.keys import FIRST_CLIENT, SECRET_BYTES, HubKeys
from actors.worker import openmp
from actors.worker.draft_rank import draft_setup
from actors.worker.factory import SWITCH_INTERVAL_S
from actors.worker.spec import RankSpec
from cluster.config.jobs import PoolConfig
from cluster.config.schema import LaunchConfig
from cluster.io.checkpoints import check_checkpoints
from cluster.io.console import Terminal
from cluster.io.text import read_eos_token_ids
from cluster.jobs.serve import first_signal
from cluster.keys import write_privately
from cluster.placement.ranks import Devices, place_alone
from cluster.runtime.backend import LOOPBACK, rank_spec
from parallel.comm.group import SINGLE
from parallel.runtime.device import use_device


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for a drafter that cannot be lent, and for an address or a file that cannot be used."""
    job: PoolConfig = config.job
    terminal = Terminal()
    openmp.configure_threads(shared=False)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    check_lendable(config)
    keys = HubKeys(_secret(job))
    hub = Hub(f"tcp://{LOOPBACK}:*", keys, client_address=job.listen)
    directory = run_dir / "logs"
    open_logs("pool", LogSpec(config.cluster.log_level, (str(directory),)))
    try:
        with terminal.starting() as progress, first_signal() as stopping:
            progress("loading the drafter")
            service = _open(config, hub, terminal.line)
            key_file = Path(f"{job.secret_file}.key").expanduser() if job.secret_file else directory / "pool.key"
            write_privately(key_file, keys.of(FIRST_CLIENT).text)
            terminal.line(f"lending drafter={config.drafter.name} at {hub.client_address}, key in {key_file}")
            service.serve(stopping.is_set)
    finally:
        hub.close()
        close_logs()


def check_lendable(config: LaunchConfig) -> None:
    """Raise ValueError, one line, for a drafter that a pool cannot lend."""
    drafter, name = config.drafter, config.drafter.name
    why = ""
    if name in ("none", "pool") or config.pipeline.name == "plain":
        why = "drafts nothing here; give drafter=model, or a lookup, and the pipeline of the engines"
    elif drafter.reads_features or name == "self":
        why = "reads the target's hidden states, which are not sent to a pool; use drafter=model"
    elif drafter.target_top_k:
        why = "learns from the target's tokens of all its requests, which engines must not share; use drafter=model"
    elif len(drafter.roles()) > 1 or any(model.ranks > 1 for model in drafter.models_of("draft", config.pipeline.name)):
        why = "takes several ranks; a pool has one"
    elif config.verify.rule != "coupled":
        raise ValueError(f"verify={config.verify.rule}: a pool's drafts are verified by verify=coupled; use that")
    if why:
        raise ValueError(f"drafter={name}: {why}")


def _open(config: LaunchConfig, hub: Hub, observe: Callable[[str], None]) -> PoolService:
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
        drafter, measured = spec.drafter.build(draft_setup(spec, SINGLE))
        facts.update(measured)
        return drafter

    shared = SharedDrafter(MergedPasses(build), int(str(facts["kv_slots"])) if "kv_slots" in facts else None)
    terms = LeaseTerms(str(config.verify.rule), str(config.pipeline.name), tokenizer_digest(checkpoint))
    limits = PoolLimits(job.max_leases, job.lease_s, config.drafter.num_draft_tokens)
    return PoolService(hub, spec, terms, limits, shared, observe)


def _secret(job: PoolConfig) -> bytes:
    """That of the file, which is made where there is none."""
    if not job.secret_file:
        return secrets.token_bytes(SECRET_BYTES)
    file = Path(job.secret_file).expanduser()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_privately(file, secrets.token_hex(SECRET_BYTES))
    try:
        secret = bytes.fromhex(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"job.secret_file={file}: cannot be read ({error}); delete it for a new one") from error
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"job.secret_file={file}: has {len(secret)} bytes, not {SECRET_BYTES}; delete it for a new one")
    return secret
