"""The settings of `job=train`: plain values only, so that Hydra and a test can both build them. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

STAGES = ("tokenizer", "target", "continuations", "drafter", "report")
"""Every stage, in the order they must run. A stage reads what earlier stages left in `out`."""


@dataclass(frozen=True)
class TrainConfig:
    """How the pocket pair is trained. A budget of minutes stops early when its budget of steps is reached first."""

    name: str = "train"
    """Name of the job."""
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    """Which stages run; a subset of `STAGES`."""
    out: str | None = None
    """Folder that receives `target/`, `drafter/`, prompts and report. Default: the run directory."""
    work: str | None = None
    """Folder of loss logs, checkpoints and continuations; name it to run the stages one by one. Default: `work` in the
    run directory."""
    seed: int = 0
    """Seeds the choice of tests, the order of sources, the weights and the batches."""
    threads: int = 0
    """CPU threads; 0 leaves PyTorch's choice."""
    device: str = "cpu"
    """PyTorch device of both models."""
    compile: bool = True
    """Compile loss and forward pass; about a minute per shape once, then a third faster on a CPU."""

    vocab_size: int = 4096
    """Entries of the tokenizer, special token included."""
    test_megabytes: float = 6.0
    """Upper bound on test files in the corpus, in 10^6 bytes."""
    held_out_tokens: int = 32768
    """Tokens of held-out source on which loss and agreement are measured."""

    batch_tokens: int = 6144
    """Tokens per optimizer step."""
    sequence_length: int = 512
    """Tokens per training sequence in the last part of the schedule."""
    short_sequence_length: int = 256
    """Tokens per training sequence of the target in the first part, where short attention is cheaper."""
    short_fraction: float = 0.7
    """Fraction of the target's schedule trained at `short_sequence_length`."""

    target_minutes: float = 40.0
    """Wall-clock budget of the target's training, in minutes."""
    target_steps: int = 0
    """Budget of the target's training in optimizer steps; 0 means minutes alone decide."""
    drafter_layers: int = 2
    """Layers of the drafter. The bundled `drafter.path=pocket-deep` has 8."""
    drafter_minutes: float = 18.0
    """Wall-clock budget of the drafter's training, in minutes."""
    drafter_steps: int = 0
    """Budget of the drafter's training in optimizer steps; 0 means minutes alone decide."""

    matrix_learning_rate: float = 5e-3
    """Peak rate of Muon (hidden matrices), scaled to match AdamW's update size."""
    other_learning_rate: float = 3e-3
    """Peak rate of AdamW (embeddings and norms)."""
    warmup_steps: int = 40
    """Optimizer steps of linear warm-up."""
    decay_fraction: float = 0.6
    """Last fraction of the schedule, over which the rate falls linearly to 0."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this total norm."""

    continuation_prompts: int = 1536
    """Prompts cut from training sources that the target continues greedily for the drafter."""
    continuation_length: int = 256
    """Length of prompt and continuation together, in tokens."""
    continuation_batch: int = 128
    """Prompts continued at once."""
    lesson_tokens: int = 1_200_000
    """Tokens of training sources, tests left out, that the drafter learns from besides all continuations."""

    num_prompts: int = 48
    """Held-out prompts written to `prompts.jsonl`."""
    num_prompt_tokens: int = 128
    """Tokens generated per held-out prompt when acceptance is measured."""
    max_draft_tokens: int = 8
    """Acceptance length is reported for 1 to this many draft tokens per round."""

    checkpoint_minutes: float = 5.0
    """Minutes between two checkpoints."""
    log_steps: int = 10
    """Optimizer steps between two lines of the loss log."""
