"""What a user may choose about a plan. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """`job=plan`: predict the speed of every layout, here or on a described cluster, and try the best of them."""

    name: str = "plan"
    """Set by the choice `job=`."""
    costs: str = ""
    """YAML with the pass costs of a cluster to plan for; empty = measure this machine."""
    prompts: str = ""
    """JSONL with a `prompt` field or Spec-Bench `turns`; empty = the held-out prompts of the pocket pair."""
    limit: int = 4
    """Prompts to read; 0 = all."""
    batch: int = 1
    """Requests in flight."""
    draft_lengths: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 8])
    """`drafter.num_draft_tokens` to choose from."""
    target_ranks: list[int] = field(default_factory=list)
    """`target.tp` to choose from; empty = every power of two that fits."""
    draft_ranks: list[int] = field(default_factory=list)
    """`drafter.ranks` to choose from; empty = every power of two that fits."""
    parallels: list[str] = field(default_factory=lambda: ["single", "tensor", "layer"])
    """`drafter.parallel` to choose from."""
    layer_groups: list[int] = field(default_factory=lambda: [2, 3, 4])
    """`drafter.layer_group` to choose from."""
    pipelines: list[str] = field(default_factory=lambda: ["sync", "pearl", "branches", "tree", "pingpong"])
    """`pipeline` to choose from; plain decoding is always among them."""
    seconds: float = 1.5
    """Time to measure every role in every shape."""
    trials: int = 2
    """Layouts, the best first, that are run and compared with their predictions; 0 = none."""
    repeats: int = 3
    """Measured runs of each; medians are reported."""
    ablation: bool = False
    """Also measure what running layers side by side costs in acceptance, by policy of calibration."""


@dataclass(frozen=True, slots=True)
class PassesConfig:
    """`job=passes`: time one pass of a draft model in every way its ranks could share it, weights at random."""

    name: str = "passes"
    """Set by the choice `job=`."""
    models: list[str] = field(default_factory=lambda: ["5M", "30M"])
    """Draft models: a checkpoint directory, its config.json, or 5M and 30M for models of that many parameters."""
    ranks: int = 2
    """Ranks that share it; on CPU each has a core of its own."""
    layer_groups: list[int] = field(default_factory=lambda: [2])
    """`drafter.layer_group` to time."""
    rows: list[int] = field(default_factory=lambda: [1, 8])
    """Tokens of a pass."""
    context: int = 128
    """Tokens before them."""
    repeats: int = 60
    """Timed passes of each kind; medians are reported."""
