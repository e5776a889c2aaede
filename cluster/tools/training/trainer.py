"""The training loop: batches in, weights changed, losses logged. It must not know corpus, distillation or files' names.

Muon moves the hidden matrices, AdamW embeddings and norms; the forward pass runs in bfloat16 under autocast over
float32 weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import LlamaForCausalLM

from cluster.tools.training.objectives import Loss
from cluster.tools.training.schedule import Budget, Clock, rate_factor

SamplingKind = Callable[[float], tuple[torch.Tensor, torch.Tensor]]
"""Gives the batch for the current progress in [0, 1): tokens, and what is to be learnt at each; see `Loss`."""


@dataclass(frozen=True)
class Recipe:
    """Optimizer and logging settings of one run; the fields mean what they mean in `TrainConfig`."""

    matrix_learning_rate: float
    other_learning_rate: float
    warmup_steps: int
    decay_fraction: float
    clip_norm: float
    checkpoint_minutes: float
    log_steps: int


@dataclass(frozen=True)
class TrainingRecord:
    """What one run spent and reached."""

    steps: int
    """Optimizer steps taken."""
    tokens: int
    """Tokens trained on, repetitions counted."""
    seconds: float
    """Wall-clock seconds, compilation included."""
    final_loss: float
    """Mean training loss of the last tenth of the logged steps, in nats per token."""

    @property
    def tokens_per_second(self) -> float:
        """Training speed in tokens per second."""
        return self.tokens / self.seconds


def optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon over the hidden matrices and AdamW over everything else."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=recipe.matrix_learning_rate, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=recipe.other_learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def fit(
    model: LlamaForCausalLM,
    draw: SamplingKind,
    loss_of: Loss,
    recipe: Recipe,
    budget: Budget,
    work: Path,
    title: str,
) -> TrainingRecord:
    """Train `model` in place until the budget is spent.

    Args:
        model: float32 weights on their device.
        draw: gives batches on the CPU.
        loss_of: computes the loss, autocast excluded.
        recipe: optimizer and logging settings.
        budget: when to stop.
        work: receives `loss.jsonl` and the folder `checkpoint/`, overwritten every few minutes.
        title: names the run in the progress bar.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    work.mkdir(parents=True, exist_ok=True)
    steppers = optimizers(model, recipe)
    peaks = [stepper.param_groups[0]["lr"] for stepper in steppers]
    clock, step, tokens, saved_at, losses = Clock(budget), 0, 0, 0.0, []
    model.train()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with (work / "loss.jsonl").open("w") as log, Progress(*columns, transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        while (progress := clock.progress(step)) < 1.0:
            factor = rate_factor(step, progress, recipe.warmup_steps, recipe.decay_fraction)
            for stepper, peak in zip(steppers, peaks, strict=True):
                stepper.param_groups[0]["lr"] = peak * factor
            batch, lesson = (part.to(model.device) for part in draw(progress))
            with torch.autocast(model.device.type, torch.bfloat16):
                loss = loss_of(batch, lesson)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
            step += 1
            tokens += batch.numel()
            if step % recipe.log_steps == 0 or step == 1:
                losses.append(loss.detach().item())
                if not math.isfinite(losses[-1]):
                    raise FloatingPointError(f"the loss of step {step} is not finite; lower the learning rates")
                line = {"step": step, "tokens": tokens, "seconds": round(clock.seconds, 1), "loss": losses[-1]}
                log.write(json.dumps(line) + "\n")
                log.flush()
                bar.update(task, completed=progress, description=f"{title} {clock.seconds:.0f} s loss {losses[-1]:.3f}")
            if clock.seconds - saved_at > 60 * recipe.checkpoint_minutes:
                model.save_pretrained(work / "checkpoint")
                saved_at = clock.seconds
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    record = TrainingRecord(step, tokens, clock.seconds, sum(last) / len(last))
    (work / "record.json").write_text(json.dumps(asdict(record), indent=2) + "\n")
    return record
