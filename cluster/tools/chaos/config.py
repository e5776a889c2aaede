"""What a user may choose about a drill. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DrillConfig:
    """`job=drill`: kill and freeze processes at random moments under load, and see that every request survives."""

    name: str = "drill"
    """Set by the choice `job=`."""
    prompts: str = ""
    """JSONL with a `prompt` field or Spec-Bench `turns`; empty = bundled prompts, see `job.workload`."""
    workload: str = "completion"
    """Bundled prompts: completion of held-out code; editing, which copies; agent, whose sessions repeat each other."""
    limit: int = 8
    """Prompts to read; 0 = all."""
    concurrency: int = 4
    """Requests in flight."""
    faults: int = 8
    """Times that a process is killed or frozen, one after the other: every kind with every signal, in random order."""
    pairs: float = 0.0
    """Share of the faults that strike two processes of different roles at the same moment, from 0 to 1."""
    signals: list[str] = field(default_factory=lambda: ["SIGKILL", "SIGSTOP"])
    """What is sent to them: SIGKILL ends a process, SIGSTOP freezes it."""
    spacing_s: float = 1.0
    """Mean time from one recovery to the next fault."""
    seed: int = 0
    """Decides the order of the faults and the times between them."""
