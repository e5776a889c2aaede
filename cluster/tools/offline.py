"""Models and prompts in this process, without an engine: for tools that score texts or count tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from actors.drafters.config import DraftSetup
from actors.drafters.model.config import ModelDrafterConfig
from actors.drafters.model.loading import head_rows
from actors.options import TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.config.schema import LaunchConfig
from cluster.io.prompts import read_prompts
from cluster.io.text import load_tokenizer, read_eos_token_ids
from parallel.comm.group import SINGLE
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.kv_sizing import choose_dtype, choose_kv_dtype, choose_weights
from parallel.runtime.runner import open_model


def open_alone(
    model: TargetConfig | ModelDrafterConfig, num_slots: int, device: str = "", **options: Any
) -> DecoderRunner:
    """The model that a launch configures, on one rank; `device` replaces the configured one."""
    device = device or model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = choose_dtype(model.dtype, device)
    options["weights"] = choose_weights(model.weights, model.dtype, device, model.path)
    options["kv_dtype"] = choose_kv_dtype(model.kv_dtype, dtype)
    if isinstance(model, TargetConfig):
        options["stretch"] = model.stretch
        if model.is_invariant:
            options |= {"invariant": True, "backend": model.attention}
    else:
        options["head"] = head_rows(model)
    return open_model(model.path, SINGLE, device, dtype, num_slots, **options)


@dataclass(frozen=True, slots=True)
class OfflineTask:
    """The prompts of a job in the target's tokens, and how each is completed."""

    prompts: list[tuple[int, ...]]
    sampling: list[SamplingParams]
    eos_token_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of a completion."""
        return self.sampling[0].max_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return max(map(len, self.prompts)) + self.num_tokens

    def check_room(self, num_positions: int) -> None:
        """Raise ValueError, one line, for texts that exceed the positions that drafts leave."""
        if self.longest > num_positions:
            remedy = f"the {num_positions} positions that the models have beside a draft; lower it"
            raise ValueError(f"sampling.max_tokens={self.num_tokens}: prompt and completion exceed {remedy}")


def read_task(config: LaunchConfig) -> OfflineTask:
    """What `job.prompts`, `job.limit` and `sampling` say; prompt i takes seed + i."""
    checkpoint, job = Path(config.target.path), config.job
    tokenizer = load_tokenizer(checkpoint)
    prompts = [tuple(tokenizer.encode(prompt.text).ids) for prompt in read_prompts(Path(job.prompts), job.limit)]
    params = config.sampling_params(tokenizer)
    sampling = [replace(params, seed=params.seed + i) for i in range(len(prompts))]
    return OfflineTask(prompts, sampling, read_eos_token_ids(checkpoint))


def setup_beside(target: DecoderRunner, config: LaunchConfig, task: OfflineTask) -> DraftSetup:
    """What the launch's drafter is built from, to draft in turn with this target."""
    device, eos = str(target.decoder.device), task.eos_token_ids
    return DraftSetup(config.verify, "sync", config.scheduler, SINGLE, device, eos, config.target, target)
