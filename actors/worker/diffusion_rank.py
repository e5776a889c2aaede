"""The target role of one rank, from its `RankSpec`, where the target fills masks instead of writing token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from actors.roles.diffusion_target import BlockwiseTargetRole, DiffusionTargetRole, copied_rows
from actors.roles.whole_text_target import WholeTextTargetRole
from actors.worker.spec import RankSpec
from actors.worker.target_rank import finish_target, fit_target, load_target
from parallel.comm.group import Group
from parallel.model.config import DecoderConfig


def build_diffusion_target(
    spec: RankSpec, group: Group, model: DecoderConfig
) -> tuple[DiffusionTargetRole, dict[str, object]]:
    """The role and what it measured. Its pool has slots for the states of a pass beside those that the coordinator
    knows of, and for blocks that earlier passes of the round kept; a decoder that keeps no rows has no others, and then
    these are a number of texts."""
    config, scheduler, diffusion = spec.target, spec.scheduler, model.diffusion
    assert diffusion is not None, "this model fills no masks"
    max_model_len = min(config.max_model_len or model.max_positions, model.max_positions)
    decoder = "static" if config.decoder == "auto" else config.decoder
    keeps_rows = not diffusion.sees_all or decoder != "static"
    if diffusion.sees_all:
        num_copied = max_rows = max(scheduler.max_num_batched_tokens, max_model_len)
    else:
        block = diffusion.block_size
        max_rows = max(scheduler.max_num_batched_tokens, block) + block  # text is read up to the end of a block
        num_copied = scheduler.max_num_seqs * copied_rows(block, config.num_states)
        num_copied = min(num_copied, max_rows + scheduler.max_num_seqs * block)
    num_slots = config.kv_slots + num_copied if config.kv_slots else 0
    memory = fit_target(spec, group, num_slots=num_slots if keeps_rows else num_copied, max_num_batched_tokens=max_rows)
    num_slots, most = memory.num_slots, scheduler.max_num_seqs * max_model_len
    if keeps_rows and not config.kv_slots and num_slots == most:  # memory is left
        num_slots += num_copied
    if keeps_rows and num_slots <= num_copied:
        remedy = "lower target.max_model_len" if diffusion.sees_all else "lower it or scheduler.max_num_seqs"
        raise ValueError(
            f"target.num_states={config.num_states}: states of a pass take all {num_slots} KV slots; {remedy}"
        )
    kv_slots = num_slots - num_copied if keeps_rows else config.kv_slots or most
    sizes = memory.facts() | {"kv_slots": kv_slots}
    runner = load_target(spec, group, replace(memory, num_slots=num_slots), sizes, graphs=False)
    role_options: dict[str, Any] = {
        "is_lead": spec.rank == 0,
        "max_rows": max_rows,
        "num_states": config.num_states,
        "threshold": config.unmask_threshold,
        "weights": spec.served,
    }
    if diffusion.sees_all:
        role_options |= {"decoder": decoder, "max_model_len": max_model_len}
        role: DiffusionTargetRole = WholeTextTargetRole(runner, spec.eos_token_ids, **role_options)
    else:
        role = BlockwiseTargetRole(runner, spec.eos_token_ids, **role_options)
    sizes |= {"block_size": diffusion.block_size, "whole_texts": int(diffusion.sees_all), "drafters": []}
    return role, finish_target(spec, role.runner) | sizes
