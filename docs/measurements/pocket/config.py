"""The settings of the bundled pair, with the values that it was made with. Knows no stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from cluster.tools.training.trainer import Recipe
from parallel.ranges import OneOf, Range, Section

STAGES = ("tokenizer", "target", "continuations", "drafter", "report")
"""Stages in the order in which they run; each reads what earlier ones left."""

RECIPE = Recipe()
"""Optimizer and logging settings of both models."""

SHORT_FRACTION = 0.7
"""Fraction of the target's schedule trained on sequences of half the length, where attention is cheaper."""


@dataclass(frozen=True, slots=True)
class PairConfig(Section):
    """What the stages are run with."""

    stages: Annotated[list[str], OneOf(STAGES, filled=True)] = field(default_factory=lambda: list(STAGES))
    """Those to run."""
    out: str | None = None
    """Directory for what is shipped; null = `runs/pair`."""
    work: str | None = None
    """Directory for logs, state and the target's continuations; null = `runs/pair/work`."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of the order of the faults and the times between them."""
    threads: Annotated[int, Range(0, zero="PyTorch's choice")] = 0
    """CPU threads; 0 = PyTorch's choice."""
    device: str = "cpu"
    """PyTorch device of both models."""
    resume: bool = False
    """Go on with a training that was killed, from the state in `work`."""
    compile: bool = True
    """Compile loss and forward pass: about a minute per shape once, a third faster on a CPU afterwards."""
    vocab_size: Annotated[int, Range(257)] = 4096
    """Entries of the tokenizer, special token included; a byte-level tokenizer has at least 257."""
    held_out_tokens: Annotated[int, Range(1)] = 32768
    """Tokens of held-out source on which loss and agreement are measured."""
    batch_tokens: Annotated[int, Range(1)] = 6144
    """Tokens per optimizer step."""
    sequence_length: Annotated[int, Range(2)] = 512
    """Tokens per training sequence; the target's first steps use half of it, where attention is cheaper."""
    target_minutes: Annotated[float, Range(above=0)] = 40.0
    """Minutes to train the target, at most; the first of minutes and steps that is spent ends the training."""
    target_steps: Annotated[int, Range(0, zero="minutes alone decide")] = 0
    """Optimizer steps to train the target, at most; 0 = minutes alone decide."""
    drafter_layers: Annotated[int, Range(1)] = 2
    """Layers of the drafter. The bundled `drafter.path=pocket-deep` has 8."""
    drafter_minutes: Annotated[float, Range(above=0)] = 18.0
    """Minutes to train the drafter, at most."""
    drafter_steps: Annotated[int, Range(0, zero="minutes alone decide")] = 0
    """Optimizer steps to train the drafter, at most; 0 = minutes alone decide."""
    distillation_tokens: Annotated[int, Range(0)] = 1_200_000
    """Tokens of training sources, tests left out, that the drafter is distilled on besides all continuations."""
    continuation_prompts: Annotated[int, Range(1)] = 1536
    """Prompts cut from training sources, at most, that the target continues."""
    continuation_length: Annotated[int, Range(2)] = 256
    """Length of prompt and continuation together, in tokens."""
    num_prompts: Annotated[int, Range(1)] = 48
    """Held-out prompts written to `prompts.jsonl`."""
    num_prompt_tokens: Annotated[int, Range(1)] = 128
    """Tokens generated per held-out prompt when acceptance is measured."""
