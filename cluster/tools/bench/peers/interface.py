"""What a bench asks of another engine, and what peers share: one request at a time, timed.

A peer loads the same checkpoints in the same precision, on the same device, with as many threads as the target role
has, and completes one request at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from actors.drafters.model.config import ModelDrafterConfig
from cluster.io.prompts import Prompt
from cluster.observability.results import Run, Served
from cluster.tools.bench.tasks import BenchTask


class Peer(Protocol):
    """Another engine with the target's checkpoint loaded."""

    def describe(self) -> dict[str, object]:
        """Its dtype, device and batch, for the report."""
        ...

    def sides(self, task: BenchTask) -> dict[str, object]:
        """The sides that it can complete this task as, each with a key; sides with equal keys need only one run."""
        ...

    def complete(self, side: str, task: BenchTask) -> Run:
        """One timed run."""
        ...


Timed = tuple[tuple[int, ...], float]
"""Tokens of a request, and seconds until the first of them."""


def complete_in_turn(task: BenchTask, complete: Callable[[Prompt], Timed]) -> Run:
    """All prompts of the task, one after the other."""
    run = Run()
    started = time.monotonic()
    for index, prompt in enumerate(task.prompts):
        submitted = time.monotonic()
        tokens, ttft_s = complete(prompt)
        latency_s = time.monotonic() - submitted
        reason = "length" if len(tokens) == task.sampling.max_tokens else "stop"
        run.requests.append(
            Served(index, prompt, tokens, finish_reason=reason, ttft_s=ttft_s, latency_s=latency_s),
        )
    run.wall_s = time.monotonic() - started
    return run


def greedy_sides(task: BenchTask, plain: str, speculative: str) -> dict[str, object]:
    """Sides of a peer that completes single greedy requests, plain and with a draft model of ours."""
    setting = task.setting
    if setting.batch != 1 or setting.temperature > 0:
        return {}
    common = setting.context, setting.workload, task.num_threads
    sides: dict[str, object] = {plain: (plain, *common)}
    match setting.drafter:
        case ModelDrafterConfig(path=path, num_draft_tokens=length):
            sides[speculative] = (speculative, *common, path, length)
    return sides


def check_float32_on_cpu(name: str, facts: Mapping[str, object]) -> None:
    """Raise ValueError, one line, for a target that this peer is not given: its `facts` are those of its lead rank."""
    if facts["dtype"] != "float32" or facts["device"] != "cpu":
        where = f"target.dtype={facts['dtype']} target.device={facts['device']}"
        raise ValueError(f"job.peers={name}: is compared in float32 on a CPU, not with {where}; set these or drop it")
