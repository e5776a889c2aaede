"""The target role of one rank, from its `RankSpec`, where the target fills masks instead of writing token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.logs import log_event, logger_of
from actors.roles.diffusion_target import DiffusionTargetRole, copied_rows
from actors.worker.draft_rank import device_share
from actors.worker.spec import RankSpec
from parallel.comm.group import Group
from parallel.model.config import MaskedDiffusion
from parallel.runtime.kv_sizing import fit_slots
from parallel.runtime.runner import open_model


def build_diffusion_target(
    spec: RankSpec, group: Group, diffusion: MaskedDiffusion
) -> tuple[DiffusionTargetRole, dict[str, object]]:
    """The role and what it measured. Its pool has slots for states beside those that the coordinator knows of."""
    config, scheduler = spec.target, spec.scheduler
    num_copied = scheduler.max_num_seqs * copied_rows(diffusion.block_size, config.num_states)
    fit = fit_slots(
        config.path,
        group,
        spec.device,
        config.dtype,
        stretch=config.stretch,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        max_model_len=config.max_model_len,
        num_slots=config.kv_slots + num_copied if config.kv_slots else 0,
        invariant=config.is_invariant,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens + num_copied,
        sharing=device_share(spec),
    )
    num_slots = fit.num_slots
    if not config.kv_slots and num_slots == scheduler.max_num_seqs * fit.max_model_len:  # memory is left
        num_slots += num_copied
    if num_slots <= num_copied:
        raise ValueError(
            f"target.num_states={config.num_states}: states of {scheduler.max_num_seqs} sequences take all "
            f"{num_slots} KV slots; lower it or scheduler.max_num_seqs"
        )
    sizes: dict[str, Any] = fit.facts() | {"kv_slots": num_slots - num_copied}
    log_event(logger_of(spec.identity), "sized", **sizes)  # before weights are loaded
    options: dict[str, Any] = {"weights": fit.weights, "kv_dtype": fit.kv_dtype, "backend": config.attention}
    model = fit.dtype, num_slots, config.stretch
    runner = open_model(
        spec.served.path, group, spec.device, *model, graphs=False, invariant=config.is_invariant, **options
    )
    log_event(logger_of(spec.identity), "attention", backend=runner.attention, kv_dtype=sizes["kv_dtype"])
    role = DiffusionTargetRole(
        runner,
        spec.eos_token_ids,
        is_lead=spec.rank == 0,
        num_states=config.num_states,
        threshold=config.unmask_threshold,
        weights=spec.served,
    )
    if config.pace_ms:
        from parallel.runtime.pacing import pace

        pace(role.runner, config.pace_ms)
    sizes |= {"block_size": diffusion.block_size, "pass_bytes": runner.decoder.pass_bytes(), "drafters": []}
    checkpoint = str(Path(config.path).absolute())
    return role, {"checkpoint": checkpoint, "vocab_size": runner.config.vocab_size, **sizes}
