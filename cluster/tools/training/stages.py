"""The stages of `job=train`, each reading what earlier ones left in the output folder. Knows no job and no report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.config.jobs import TrainConfig
from cluster.tools.training.batches import DistillationSet, StreamBatches, spread_rows
from cluster.tools.training.corpus import Corpus, Source, is_test
from cluster.tools.training.models import (
    CONTEXT,
    continue_text,
    drafter_config,
    grouped,
    initialised,
    load_model,
    save_model,
    target_config,
)
from cluster.tools.training.prompts import choose_prompts, write_prompts
from cluster.tools.training.tokenizer import load_tokenizer, pack, save_tokenizer, train_tokenizer
from cluster.tools.training.trainer import (
    Loss,
    Recipe,
    Resumable,
    StepLoss,
    StepOutcome,
    TrainingBudget,
    TrainingRecord,
    cross_entropy,
    distillation,
    fit,
)
from parallel.training.checkpoints import save_whole

RECIPE = Recipe()
"""Optimizer and logging settings of both models."""

SHORT_FRACTION = 0.7
"""Fraction of the target's schedule trained on sequences of half the length, where attention is cheaper."""

CONTINUATION_BATCH = 128
"""Prompts continued at once."""


@dataclass(frozen=True)
class Workplace:
    """What every stage needs."""

    config: TrainConfig
    corpus: Corpus
    out: Path
    """Receives what is shipped."""
    work: Path
    """Receives logs, checkpoints and intermediate tokens."""


def make_tokenizer(place: Workplace) -> None:
    """Learn the tokenizer from the training sources, put it beside both models, and cut the held-out prompts."""
    tokenizer = train_tokenizer(place.corpus.training, place.config.vocab_size)
    for role in ("target", "drafter"):
        save_tokenizer(tokenizer, place.out / role, CONTEXT)
    prompts = choose_prompts(place.corpus.held_out, tokenizer, place.config.seed, place.config.num_prompts)
    write_prompts(prompts, place.out / "prompts.jsonl")


def make_target(place: Workplace) -> TrainingRecord:
    """Train the target on the sources with cross entropy and write it to `out/target`."""
    config = place.config
    model = initialised(target_config(config.vocab_size), config.seed, config.device)
    batches = StreamBatches(pack(load_tokenizer(place.out / "target"), place.corpus.training), config.seed)

    loss_of = _compiled(cross_entropy(model), config)

    def step_loss(_: int, progress: float) -> StepOutcome:
        length = config.sequence_length // 2 if progress < SHORT_FRACTION else config.sequence_length
        rows = batches.draw(max(1, config.batch_tokens // length), length).to(model.device)
        return StepOutcome(loss_of(rows[:, :-1], rows[:, 1:]), rows[:, 1:].numel())

    record = _fit(
        place, model, step_loss, batches, TrainingBudget(config.target_minutes, config.target_steps), "target"
    )
    save_model(model, place.out / "target")
    return record


def make_continuations(place: Workplace) -> int:
    """Let the target continue prompts cut from training sources that are no tests; return the number of tokens."""
    config = place.config
    tokenizer = load_tokenizer(place.out / "target")
    target = load_model(place.out / "target", config.device, torch.bfloat16)
    prompts = choose_prompts(library_sources(place.corpus), tokenizer, config.seed, config.continuation_prompts)
    tokens = [tokenizer.encode(prompt.prompt).ids for prompt in prompts]
    groups = grouped(tokens, config.continuation_length, CONTINUATION_BATCH)
    stream = torch.cat([continue_text(target, group, config.continuation_length).flatten() for group in groups])
    place.work.mkdir(parents=True, exist_ok=True)
    save_whole(stream, place.work / "continuations.pt")
    return len(stream)


def make_drafter(place: Workplace) -> TrainingRecord:
    """Distil the drafter from the target on sources and on the target's continuations; write it to `out/drafter`.

    FileNotFoundError without the target or its continuations.
    """
    config = place.config
    if not (place.work / "continuations.pt").exists():
        raise FileNotFoundError(f"no continuations.pt in {place.work}; run the continuations stage first")
    teacher = load_model(place.out / "target", config.device).requires_grad_(False)
    student = initialised(drafter_config(config.vocab_size, config.drafter_layers), config.seed, config.device)
    length = config.sequence_length
    stream = pack(load_tokenizer(place.out / "target"), library_sources(place.corpus))
    continuations = torch.load(place.work / "continuations.pt")
    rows = torch.cat(
        (
            spread_rows(stream, length, config.distillation_tokens)[:, :length],
            spread_rows(continuations, length, len(continuations))[:, :length],
        )
    )
    distillation_set = DistillationSet(teacher, rows, config.seed)

    loss_of = _compiled(distillation(student, teacher), config)

    def step_loss(_step: int, _progress: float) -> StepOutcome:
        tokens, hidden = distillation_set.draw(max(1, config.batch_tokens // length))
        return StepOutcome(loss_of(tokens.to(student.device), hidden.to(student.device)), tokens.numel())

    budget = TrainingBudget(config.drafter_minutes, config.drafter_steps)
    record = _fit(place, student, step_loss, distillation_set, budget, "drafter")
    save_model(student, place.out / "drafter")
    return record


def _fit(
    place: Workplace,
    model: torch.nn.Module,
    step_loss: StepLoss,
    source: Resumable,
    budget: TrainingBudget,
    role: str,
) -> TrainingRecord:
    config = place.config
    device = torch.device(config.device).type
    return fit(
        model, step_loss, RECIPE, budget, place.work / role, device=device, sources=[source], resume=config.resume
    )


def library_sources(corpus: Corpus) -> list[Source]:
    """Return the training sources that are no tests: they are what the held-out prompts resemble."""
    return [source for source in corpus.training if not is_test(source.path)]


def _compiled(loss_of: Loss, config: TrainConfig) -> Loss:
    """Compile a loss, one static graph per batch shape."""
    return torch.compile(loss_of, dynamic=False) if config.compile else loss_of
