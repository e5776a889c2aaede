"""What a user may choose about a bench: axes, repeats, peers. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """`job=bench`: measure configurations against plain decoding in one run. An empty axis stays as configured."""

    name: str = "bench"
    """Set by the choice `job=`."""
    prompts: str = ""
    """JSONL with a `prompt` field or Spec-Bench `turns`; empty = bundled prompts, see `job.workload`."""
    workload: str = "completion"
    """Bundled prompts: completion of held-out code; editing, which copies; agent, whose sessions repeat each other."""
    limit: int = 8
    """Prompts to read; 0 = all."""
    repeats: int = 3
    """Measured runs of each configuration; medians are reported."""
    warmup: int = 1
    """Unmeasured runs before them, over as many prompts as are in flight."""
    workloads: list[str] = field(default_factory=list)
    """Axis: bundled prompts, see `job.workload`."""
    drafters: list[Any] = field(default_factory=list)
    """Axis: choices of `drafter=`, or their keys as `{name: model, path: DIR}`, or a cascade's levels as
    `[ngram,model]`."""
    pipelines: list[str] = field(default_factory=list)
    """Axis: choices of `pipeline=`."""
    temperatures: list[float] = field(default_factory=list)
    """Axis: `sampling.temperature`."""
    batches: list[int] = field(default_factory=list)
    """Axis: requests in flight; one if empty."""
    draft_lengths: list[int] = field(default_factory=list)
    """Axis: `drafter.num_draft_tokens`, each kept whatever it costs, as with pipeline.adaptive=false."""
    parallels: list[str] = field(default_factory=list)
    """Axis: `drafter.parallel`; single takes one rank, the others `drafter.ranks`."""
    contexts: list[int] = field(default_factory=list)
    """Axis: prompt lengths in tokens, made of the prompts' texts; the prompts as they are if empty."""
    peers: list[str] = field(default_factory=list)
    """Other engines to time on the same prompts: transformers (plain and assisted, one request at a time)."""
