"""What a user may choose about a certificate. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CertifyConfig:
    """`job=certify`: prove that speculation leaves the output of this target unchanged."""

    name: str = "certify"
    """Set by the choice `job=`."""
    prompts: str = ""
    """JSONL with a `prompt` field or Spec-Bench `turns`; empty = bundled prompts, see `job.workload`."""
    workload: str = "completion"
    """Bundled prompts: completion of held-out code; editing, which copies; agent, whose sessions repeat each other."""
    limit: int = 6
    """Prompts to read; 0 = all."""
    concurrency: int = 4
    """Requests in flight; 0 = all at once."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures to certify, in place of `sampling.temperature`; 0 = greedy."""
    seeds: list[int] = field(default_factory=lambda: [0, 1])
    """Seeds of sampled outputs, in place of `sampling.seed`."""
    contexts: int = 3
    """Prompts behind which next tokens are drawn many times."""
    draws: int = 4000
    """Draws behind each of them, at every temperature above 0; more show a smaller bias."""
    significance: float = 0.001
    """Probability that a right rule fails by chance, over all comparisons of laws together."""
    power: float = 0.99
    """Probability with which a bias of the size that is reported would have been found."""
