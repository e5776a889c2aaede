"""What a bench asks of another engine, and what peers share: the counterparts of our drafters, requests in turn, timed.

A peer loads the same checkpoints on the same device, with as many threads as plain decoding by itself has. It runs in
its own arithmetic, as its users get it: the number type, KV cache and kernels that it chooses. Beside it, `exact`, runs
the same one in the number type of this engine throughout: float32 on a CPU. Every peer has a process of its own.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from actors.drafters.auto.config import AutoDrafterConfig
from actors.drafters.cascade.config import CascadeDrafterConfig
from actors.drafters.config import DrafterConfig
from actors.drafters.lookup.copy import CopyDrafterConfig
from actors.drafters.lookup.maxgram import MaxgramDrafterConfig
from actors.drafters.lookup.ngram import NgramDrafterConfig
from actors.drafters.lookup.suffix import SuffixDrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.apart import Apart
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.io.text import read_eos_token_ids
from cluster.observability.results import Run, Served
from cluster.tools.bench.tasks import BenchTask

_LOOKUPS = (NgramDrafterConfig, SuffixDrafterConfig, MaxgramDrafterConfig, CopyDrafterConfig)
_MAX_NGRAM = 3


class Means(StrEnum):
    """How a peer speculates; the end of the name of a side."""

    plain = ""
    model = "draft model"
    lookup = "prompt lookup"


@dataclass(frozen=True, slots=True)
class Speculation:
    """Draft tokens a round, the checkpoint of a draft model, and the longest n-gram of a prompt lookup."""

    means: Means = Means.plain
    num_draft_tokens: int = 0
    path: str = ""
    max_ngram: int = 0


def speculations(drafter: DrafterConfig) -> dict[str, Speculation]:
    """The counterparts of a drafter, or of the members of one, by their means; plain decoding is always there."""
    found: dict[str, Speculation] = {Means.plain: Speculation()}
    for member in _members(drafter):
        match member:
            case ModelDrafterConfig(path=path, num_draft_tokens=length):
                found.setdefault(Means.model, Speculation(Means.model, length, path))
            case _ if isinstance(member, _LOOKUPS):
                longest = member.max_ngram if isinstance(member, NgramDrafterConfig) else _MAX_NGRAM
                length = member.num_draft_tokens
                found.setdefault(Means.lookup, Speculation(Means.lookup, length, max_ngram=longest))
    return found


def _members(drafter: DrafterConfig) -> Iterator[DrafterConfig]:
    match drafter:
        case AutoDrafterConfig(drafters=inner) | CascadeDrafterConfig(levels=inner):
            for one in inner:
                yield from _members(one)
        case _:
            yield drafter


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What a peer is given: the target, and what its lead rank found out about it."""

    target: TargetConfig
    dtype: str
    device: str
    max_model_len: int

    @classmethod
    def of_engine(cls, engine: Engine) -> Self:
        facts = engine.ready["target-0"].facts
        return cls(engine.config.target, str(facts["dtype"]), str(facts["device"]), int(facts["max_model_len"]))


class PeerApart(Apart):
    """A `SpeculatingPeer` in a process of its own."""

    def describe(self) -> dict[str, object]:
        return self.call("describe")

    def sides(self, task: BenchTask) -> dict[str, object]:
        return self.call("sides", task)

    def complete(self, side: str, task: BenchTask) -> Run:
        return self.call("complete", side, task)


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


class SpeculatingPeer(ABC):
    """A peer that runs plain, with a draft model of ours and by its own prompt lookup."""

    name: str
    """Its side without speculation."""
    package: str
    """The package with its version."""
    only_greedy = True
    takes_batches = False
    """Whether it completes several requests at a time."""

    def __init__(self, setup: PeerSetup, *, exact: bool) -> None:
        self.eos_token_ids = read_eos_token_ids(Path(setup.target.path))
        self.setup = setup
        self.exact = exact

    def side(self, means: str) -> str:
        """Its name. One that computes as this engine does, where the peer by itself does not, ends with the type."""
        return f"{self.name} {means}".rstrip() + f" {self.setup.dtype}" * self.exact

    def sides(self, task: BenchTask) -> dict[str, object]:
        """The sides that it can complete this task as, each with a key; sides with equal keys need only one run."""
        setting = task.setting
        if (setting.batch != 1 and not self.takes_batches) or (self.only_greedy and setting.temperature > 0):
            return {}
        common = setting.batch, setting.context, setting.workload, setting.temperature, task.num_threads
        return {self.side(means): (*common, one) for means, one in speculations(setting.drafter).items()}

    def speculation(self, side: str, task: BenchTask) -> Speculation:
        return next(one for means, one in speculations(task.setting.drafter).items() if self.side(means) == side)

    def describe(self) -> dict[str, object]:
        """Its arithmetic, device and version, for the report."""
        return {"arithmetic": self.arithmetic, "device": self.setup.device, "version": self.version}

    @property
    def version(self) -> str:
        return import_module(self.package).__version__

    @property
    @abstractmethod
    def arithmetic(self) -> str:
        """What it computes in, in words."""

    @abstractmethod
    def complete(self, side: str, task: BenchTask) -> Run:
        """One timed run."""

    def close(self) -> None:  # noqa: B027 (only some leave something behind)
        """Delete what it wrote."""


class FilePeer(SpeculatingPeer):
    """A peer that reads files of its own, on a CPU, greedily.

    It writes each checkpoint once, and opens the model once for every number of threads and way to speculate.
    """

    write: Callable[[str, Path, int], None]
    """Writes a checkpoint at a place, with so many layers that change nothing."""

    def __init__(self, setup: PeerSetup, *, exact: bool) -> None:
        super().__init__(setup, exact=exact)
        self._folder = TemporaryDirectory(prefix="specdec-peer-")
        self._files: dict[str, str] = {}
        self._opened: dict[object, Any] = {}

    @abstractmethod
    def open(self, num_threads: int, target: str, drafter: str, speculation: Speculation) -> Any:
        """The model over what was written of the target and, unless that is empty, of the drafter."""

    @abstractmethod
    def answer(self, opened: Any, prompt: Prompt, sampling: SamplingParams, speculation: Speculation) -> Timed:
        """Complete one prompt."""

    def complete(self, side: str, task: BenchTask) -> Run:
        how = self.speculation(side, task)
        key = task.num_threads, how
        if key not in self._opened:
            target = self.setup.target
            files = self._file(target.path, target.stretch), self._file(how.path) if how.path else ""
            self._opened[key] = self.open(task.num_threads, *files, how)
        opened = self._opened[key]
        return complete_in_turn(task, lambda prompt: self.answer(opened, prompt, task.sampling, how))

    def _file(self, path: str, stretch: int = 0) -> str:
        key = f"{path} {stretch}"
        if key not in self._files:
            place = Path(self._folder.name, str(len(self._files)))
            self.write(path, place, stretch)
            self._files[key] = str(place)
        return self._files[key]

    def close(self) -> None:
        self._opened.clear()
        self._folder.cleanup()


def checkpoint_dtype(path: str) -> str:
    """The number type that a checkpoint names, which transformers loads it in; float32 for one that names none."""
    config = json.loads((Path(path) / "config.json").read_text())
    return config.get("dtype") or config.get("torch_dtype") or "float32"
