"""What a bench asks of another engine, and what peers share: one request at a time, timed.

A peer loads the same checkpoints in the same precision, on the same device, with as many threads as the target role
has, and completes one request at a time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from actors.drafters.model.config import ModelDrafterConfig
from actors.options import TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.io.prompts import Prompt
from cluster.io.text import read_eos_token_ids
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


class FilePeer(ABC):
    """A peer that reads files of its own: greedy requests in float32 on a CPU, plain and with a draft model of ours.

    It writes each checkpoint once, and opens the model once for every number of threads and every draft model.
    """

    plain: str
    speculative: str
    """Names of its sides."""
    package: str
    """The package with its version."""

    def __init__(self, target: TargetConfig) -> None:
        self.eos_token_ids = read_eos_token_ids(Path(target.path))
        self._target = target
        self._folder = TemporaryDirectory(prefix="specdec-peer-")
        self._files: dict[str, str] = {}
        self._opened: dict[object, Any] = {}

    @abstractmethod
    def write(self, checkpoint: str, place: Path, stretch: int) -> None:
        """Write the checkpoint at this place."""

    @abstractmethod
    def open(self, num_threads: int, target: str, drafter: str, num_draft_tokens: int) -> Any:
        """The model over what was written of the target and, unless that is empty, of the drafter."""

    @abstractmethod
    def answer(self, opened: Any, prompt: Prompt, sampling: SamplingParams, num_draft_tokens: int) -> Timed:
        """Complete one prompt; 0 draft tokens: without speculation."""

    def describe(self) -> dict[str, object]:
        version = import_module(self.package).__version__
        threads = "as the target role has"
        return {"dtype": "float32", "device": "cpu", "batch": 1, "num_threads": threads, "version": version}

    def sides(self, task: BenchTask) -> dict[str, object]:
        setting = task.setting
        if setting.batch != 1 or setting.temperature > 0:
            return {}
        common = setting.context, setting.workload, task.num_threads
        sides: dict[str, object] = {self.plain: (self.plain, *common)}
        match setting.drafter:
            case ModelDrafterConfig(path=path, num_draft_tokens=length):
                sides[self.speculative] = (self.speculative, *common, path, length)
        return sides

    def complete(self, side: str, task: BenchTask) -> Run:
        key, drafter = self.sides(task)[side], task.setting.drafter
        length, draft_file = 0, ""
        if side == self.speculative and isinstance(drafter, ModelDrafterConfig):
            length, draft_file = drafter.num_draft_tokens, self._file(drafter.path)
        if key not in self._opened:
            target_file = self._file(self._target.path, self._target.stretch)
            self._opened[key] = self.open(task.num_threads, target_file, draft_file, length)
        opened = self._opened[key]
        return complete_in_turn(task, lambda prompt: self.answer(opened, prompt, task.sampling, length))

    def _file(self, path: str, stretch: int = 0) -> str:
        key = f"{path} {stretch}"
        if key not in self._files:
            place = Path(self._folder.name, str(len(self._files)))
            self.write(path, place, stretch)
            self._files[key] = str(place)
        return self._files[key]


def check_float32_on_cpu(name: str, facts: Mapping[str, object]) -> None:
    """Raise ValueError, one line, for a target that this peer is not given: its `facts` are those of its lead rank."""
    if facts["dtype"] != "float32" or facts["device"] != "cpu":
        where = f"target.dtype={facts['dtype']} target.device={facts['device']}"
        raise ValueError(f"job.peers={name}: is compared in float32 on a CPU, not with {where}; set these or drop it")
