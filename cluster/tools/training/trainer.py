"""The training loop: losses, budget, learning rate, and weights changed batch by batch. It must not know the corpus.

Muon moves the hidden matrices, AdamW embeddings and norms; the forward pass runs in bfloat16 under autocast over
float32 weights.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import LlamaForCausalLM

from cluster.tools.training.models import logits_of

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Mean loss per token, in nats, of `[sequences, length]` tokens and the expected result at each of them."""

DrawBatch = Callable[[float], tuple[torch.Tensor, torch.Tensor]]
"""The batch for the current progress in [0, 1): tokens, and the expected result at each; see `Loss`."""


def cross_entropy(model: LlamaForCausalLM) -> Loss:
    """Return the loss against the true successor of each token, given as `[sequences, length]` tokens."""

    def loss_of(tokens: torch.Tensor, successors: torch.Tensor) -> torch.Tensor:
        logits = logits_of(model, tokens).flatten(0, 1).float()
        return F.cross_entropy(logits, successors.flatten())

    return loss_of


def distillation(student: LlamaForCausalLM, teacher: LlamaForCausalLM) -> Loss:
    """Return the loss KL(teacher || student) over the whole vocabulary.

    The teacher's distribution is given by its last hidden states, `[sequences, length, teacher's hidden size]`.
    """
    head = teacher.lm_head.weight.detach()

    def loss_of(tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        log_p = F.log_softmax(F.linear(hidden, head.to(hidden.dtype)).flatten(0, 1).float(), dim=-1)
        log_q = F.log_softmax(logits_of(student, tokens).flatten(0, 1).float(), dim=-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()

    return loss_of


class TrainingBudget:
    """Limits of one run in minutes and steps, and its progress from 0 to 1 towards the nearer one."""

    def __init__(self, minutes: float, steps: int = 0) -> None:
        """Start the clock. `minutes` of wall-clock time include compilation; 0 `steps` set no limit.

        ValueError without a positive limit.
        """
        if minutes <= 0 or steps < 0:
            raise ValueError(f"need minutes > 0 and steps >= 0, got {minutes} and {steps}")
        self._minutes, self._steps = minutes, steps
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def progress(self, step: int) -> float:
        """Return the spent part of the budget after `step` steps; at 1 or more the run is over."""
        spent = self.seconds / (60 * self._minutes)
        return max(spent, step / self._steps) if self._steps else spent


def rate_factor(step: int, progress: float, warmup_steps: int, decay_fraction: float) -> float:
    """Return the factor in [0, 1] on the peak learning rate.

    Linear warm-up over `warmup_steps` steps, a plateau, and a linear fall to 0 over the last `decay_fraction` of the
    budget. The smaller ramp applies, so that a budget shorter than the warm-up still decays.
    """
    warm = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    fall = min(1.0, max(0.0, 1.0 - progress) / decay_fraction) if decay_fraction else 1.0
    return min(warm, fall)


@dataclass(frozen=True)
class Recipe:
    """Optimizer and logging settings of one run."""

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
    checkpoint_minutes: float = 5.0
    """Minutes between two checkpoints."""
    log_steps: int = 10
    """Optimizer steps between two lines of the loss log."""


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


def optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon over the hidden matrices and AdamW over everything else."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=recipe.matrix_learning_rate, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=recipe.other_learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def fit(
    model: LlamaForCausalLM, draw: DrawBatch, loss_of: Loss, recipe: Recipe, budget: TrainingBudget, work: Path
) -> TrainingRecord:
    """Train `model`, float32 weights on their device, in place until the budget is spent.

    `draw` gives batches on the CPU; autocast is applied around `loss_of`. `work` receives `loss.jsonl`, `record.json`
    and the folder `checkpoint/`, overwritten every few minutes; its name is the run's in the progress bar. Raises
    FloatingPointError if the loss is not finite.
    """
    work.mkdir(parents=True, exist_ok=True)
    steppers = optimizers(model, recipe)
    peaks = [stepper.param_groups[0]["lr"] for stepper in steppers]
    step, tokens, saved_at = 0, 0, 0.0
    losses: list[float] = []
    model.train()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with (work / "loss.jsonl").open("w") as log, Progress(*columns, transient=True) as bar:
        task = bar.add_task(work.name, total=1.0)
        while (progress := budget.progress(step)) < 1.0:
            factor = rate_factor(step, progress, recipe.warmup_steps, recipe.decay_fraction)
            for stepper, peak in zip(steppers, peaks, strict=True):
                stepper.param_groups[0]["lr"] = peak * factor
            batch, expected = (part.to(model.device) for part in draw(progress))
            with torch.autocast(model.device.type, torch.bfloat16):
                loss = loss_of(batch, expected)
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
                    raise FloatingPointError(f"the loss of step {step} is not finite; lower the rates of `Recipe`")
                line = {"step": step, "tokens": tokens, "seconds": round(budget.seconds, 1), "loss": losses[-1]}
                log.write(json.dumps(line) + "\n")
                log.flush()
                shown = f"{work.name} {budget.seconds:.0f} s loss {losses[-1]:.3f}"
                bar.update(task, completed=progress, description=shown)
            if budget.seconds - saved_at > 60 * recipe.checkpoint_minutes:
                model.save_pretrained(work / "checkpoint")
                saved_at = budget.seconds
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    record = TrainingRecord(step, tokens, budget.seconds, sum(last) / len(last))
    (work / "record.json").write_text(json.dumps(asdict(record), indent=2) + "\n")
    return record
