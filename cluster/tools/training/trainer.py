"""The training loop: budget, learning rate, weights changed batch by batch, and a state that survives a kill.

Muon moves the hidden matrices, AdamW embeddings and norms; the forward pass runs over float32 weights, in bfloat16
where the device has instructions for it. It must not know where batches come from, nor what is trained.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from cluster.config.jobs import TrainConfig
from cluster.io.console import RareLines
from parallel.training.checkpoints import save_whole
from parallel.training.muon import Muon
from parallel.training.precision import fast_passes
from parallel.whole_files import append_text, make_folder, write_text

STATE = "state.pt"
"""File of a run's folder that it goes on from."""


@dataclass(frozen=True)
class StepOutcome:
    """What one step gives the loop."""

    loss: Tensor
    """Scalar, with gradients."""
    tokens: int
    """Tokens trained on."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars by name, logged beside the loss."""


StepLoss = Callable[[int, float], StepOutcome]
"""The outcome of a step, from its number and the progress in [0, 1)."""


class Resumable(Protocol):
    """A source of batches whose place in them is part of a run's state."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Ranks:
    """The processes that train one module together: the first writes and shows, all stop at the same step."""

    rank: int = 0
    count: int = 1
    train_parts: bool = False
    """Each trains a part of the module; gradients are averaged by `average_over_participants`."""

    def agreed(self, progress: float) -> float:
        """The first rank's value, on every rank."""
        if self.count == 1:
            return progress
        value = torch.tensor([progress], dtype=torch.float64)
        dist.broadcast(value, src=0)
        return float(value)


def average_over_participants(
    parameters: Sequence[torch.nn.Parameter], add_up: Callable[[Tensor], object] = dist.all_reduce
) -> None:
    """Average every gradient over the ranks that have one (Fed-EE, arXiv 2405.17376): ranks that do not train a layer
    do not shrink its steps. A gradient that no rank has stays absent. `add_up` sums a tensor over the ranks, in place;
    every rank calls this with the same parameters.
    """
    device = parameters[0].device
    counts = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=device)
    add_up(counts)
    for parameter, count in zip(parameters, counts.tolist(), strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        add_up(parameter.grad)
        parameter.grad /= count


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

    def resume(self, seconds: float) -> None:
        """Count the seconds that were spent before the run was killed."""
        self._start -= seconds

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
    checkpoint_minutes: float = 1.0
    """Minutes between two writings of the state."""
    evaluation_minutes: float = 1.0
    """Minutes between two evaluations, where there is one."""
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


_TABLES = ("embed", "lm_head", "table", "markov_w", "codebook")
"""Parts of the names of matrices that hold a row per token."""


def optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon over the hidden matrices and AdamW over everything else that is trained."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1 and not any(part in name for part in _TABLES)
            (matrices if is_matrix else others).append(parameter)
    steppers: list[torch.optim.Optimizer] = []
    if matrices:
        rate = recipe.matrix_learning_rate
        steppers.append(Muon(matrices, rate))
    if others:
        rate = recipe.other_learning_rate
        steppers.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0))
    return steppers


class _Run:
    """The state of one run, and its folder."""

    def __init__(
        self, model: torch.nn.Module, recipe: Recipe, budget: TrainingBudget, work: Path, sources: Sequence[Resumable]
    ) -> None:
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.model, self.recipe, self.budget, self.work, self.sources = model, recipe, budget, work, sources
        self.steppers = optimizers(model, recipe)
        self.peaks = [stepper.param_groups[0]["lr"] for stepper in self.steppers]
        self.step, self.tokens = 0, 0
        self.losses: list[float] = []

    def save(self) -> None:
        """Write all that an unbroken run would still have."""
        state = {
            "model": self.model.state_dict(),
            "steppers": [stepper.state_dict() for stepper in self.steppers],
            "sources": [source.state_dict() for source in self.sources],
            "random": torch.get_rng_state(),
            "counts": [self.step, self.tokens, self.budget.seconds],
            "losses": self.losses,
        }
        save_whole(state, self.work / STATE)

    def resume(self, is_first: bool) -> None:
        """Go on from the state in the folder, if there is one. ValueError if it is of another training."""
        path = self.work / STATE
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(f"job.resume: {path} is of another training; choose another job.work") from error
        for stepper, kept in zip(self.steppers, state["steppers"], strict=True):
            stepper.load_state_dict(kept)
        for source, kept in zip(self.sources, state["sources"], strict=True):
            source.load_state_dict(kept)
        torch.set_rng_state(state["random"])
        self.step, self.tokens, seconds = state["counts"]
        self.losses = state["losses"]
        self.budget.resume(seconds)
        for log in self.work.glob("*.jsonl") if is_first else ():
            kept = [line for line in log.read_text().splitlines() if _step_of(line) <= self.step]
            write_text(log, "".join(f"{line}\n" for line in kept))

    def is_logged(self) -> bool:
        """Whether the step that was just taken has a line in the log."""
        return self.step % self.recipe.log_steps == 0 or self.step == 1

    def learn(self, outcome: StepOutcome, progress: float, ranks: Ranks) -> None:
        """Take one step down the gradient of a loss. FloatingPointError for one that is not finite."""
        factor = rate_factor(self.step, progress, self.recipe.warmup_steps, self.recipe.decay_fraction)
        for stepper, peak in zip(self.steppers, self.peaks, strict=True):
            stepper.param_groups[0]["lr"] = peak * factor
        outcome.loss.backward()
        if ranks.train_parts:
            average_over_participants(self.trained)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        for stepper in self.steppers:
            stepper.step()
            stepper.zero_grad()
        self.step += 1
        self.tokens += outcome.tokens * ranks.count
        if self.is_logged():
            self.losses.append(outcome.loss.detach().item())
            if not math.isfinite(self.losses[-1]):
                raise FloatingPointError(f"the loss of step {self.step} is not finite; lower the learning rates")

    def write(self, name: str, values: Mapping[str, float]) -> None:
        """Append a line to one of the logs."""
        line = {"step": self.step, "tokens": self.tokens, "seconds": round(self.budget.seconds, 1), **values}
        append_text(self.work / f"{name}.jsonl", json.dumps(line) + "\n")


def _step_of(line: str) -> float:
    """The step of a line of a log; a line that the kill cut is behind all steps."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


def fit(
    model: torch.nn.Module,
    step_loss: StepLoss,
    recipe: Recipe,
    budget: TrainingBudget,
    work: Path,
    *,
    device: str = "cpu",
    sources: Sequence[Resumable] = (),
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    resume: bool = False,
    ranks: Ranks = Ranks(),
) -> TrainingRecord:
    """Train `model`, float32 weights on their device, in place until the budget is spent.

    Autocast is applied around `step_loss`. `work` receives `loss.jsonl`, `evaluation.jsonl`, `record.json` and
    `state.pt`, which `resume` goes on from as if nothing had happened; `sources` are the parts of the batches
    that have a place to go on from. The folder's name is the run's in the progress bar. Raises FloatingPointError if
    the loss is not finite, ValueError for a state of another training, and for minutes without a step.
    """
    is_first = ranks.rank == 0
    make_folder(work)
    run = _Run(model, recipe, budget, work, sources)
    if resume:
        run.resume(is_first)
    elif is_first:
        for log in work.glob("*.jsonl"):
            log.unlink()

    def measure() -> str:
        if evaluate is None:
            return ""
        model.eval()
        values = evaluate()
        model.train()
        run.write("evaluation", values)
        return f" held-out length {values['length']:.2f}" if "length" in values else ""

    saved_at = evaluated_at = budget.seconds
    shown = measure() if is_first and run.step == 0 else ""
    model.train()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not is_first) as bar:
        task, log = bar.add_task(work.name, total=1.0), RareLines(bar.console)
        while (progress := ranks.agreed(budget.progress(run.step))) < 1.0:
            with fast_passes(device):
                outcome = step_loss(run.step, progress)
            run.learn(outcome, progress, ranks)
            if not is_first:
                continue
            if run.is_logged():
                run.write("loss", {"loss": run.losses[-1], **{name: float(v) for name, v in outcome.metrics.items()}})
                said = f"{work.name} {budget.seconds:.0f} s loss {run.losses[-1]:.3f}{shown}"
                bar.update(task, completed=progress, description=said)
                log.offer(lambda: f"{said}, {progress:.0%} done")  # noqa: B023  (called at once)
            if budget.seconds - evaluated_at > 60 * recipe.evaluation_minutes:
                shown, evaluated_at = measure(), budget.seconds
            if budget.seconds - saved_at >= 60 * recipe.checkpoint_minutes:
                run.save()
                saved_at = budget.seconds
    model.eval()
    if not run.losses:
        raise ValueError("job.minutes: were over before the first step; raise it")
    last = run.losses[-max(1, len(run.losses) // 10) :]
    record = TrainingRecord(run.step, run.tokens, budget.seconds, sum(last) / len(last))
    if is_first:
        measure()
        model.eval()
        write_text(work / "record.json", json.dumps(asdict(record), indent=2) + "\n")
        run.save()
    return record


def fit_job(
    config: TrainConfig,
    model: torch.nn.Module,
    step_loss: StepLoss,
    rates: tuple[float, float],
    work: Path,
    **more: Any,
) -> TrainingRecord:
    """`fit` as the keys of `job=train` say; `rates` are the recipe's, of Muon and of AdamW."""
    muon, adamw = (config.rate * rate for rate in rates)
    recipe = Recipe(muon, adamw, evaluation_minutes=config.evaluation_minutes)
    more |= {"device": torch.device(config.device).type, "resume": config.resume}
    return fit(model, step_loss, recipe, TrainingBudget(config.minutes, config.steps), work, **more)
