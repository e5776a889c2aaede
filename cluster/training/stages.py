"""The stages of `job=train`, each reading what earlier ones left in the output folder. Knows no job and no report."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from cluster.training.architecture import CONTEXT, target_config
from cluster.training.batches import StreamBatches
from cluster.training.checkpoint import save_model
from cluster.training.config import TrainConfig
from cluster.training.corpus import Corpus
from cluster.training.objectives import cross_entropy
from cluster.training.schedule import Budget
from cluster.training.tokenizer import load_tokenizer, pack, save_tokenizer, train_tokenizer
from cluster.training.trainer import Loss, Recipe, TrainingRecord, fit


def _recipe(config: TrainConfig) -> Recipe:
    return Recipe(**{name: getattr(config, name) for name in Recipe.__dataclass_fields__})


def _compiled(loss_of: Loss, config: TrainConfig) -> Loss:
    """Compile a loss, one static graph per batch shape."""
    return torch.compile(loss_of, dynamic=False) if config.compile else loss_of


def _shape(config: TrainConfig, progress: float) -> tuple[int, int]:
    """Return number and length of the sequences of one step at a progress in [0, 1)."""
    length = config.short_sequence_length if progress < config.short_fraction else config.sequence_length
    return max(1, config.batch_tokens // length), length


def make_tokenizer(config: TrainConfig, corpus: Corpus, out: Path) -> None:
    """Learn the tokenizer from the training sources and put it beside both models."""
    tokenizer = train_tokenizer(corpus.training, config.vocab_size)
    for role in ("target", "drafter"):
        save_tokenizer(tokenizer, out / role, CONTEXT)


def make_target(config: TrainConfig, corpus: Corpus, out: Path, work: Path) -> TrainingRecord:
    """Train the target on the sources with cross entropy and write it to `out/target`."""
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(target_config(config.vocab_size)).to(config.device)
    batches = StreamBatches(pack(load_tokenizer(out / "target"), corpus.training), config.seed)

    def draw(progress: float) -> torch.Tensor:
        return batches.draw(*_shape(config, progress))

    budget = Budget(config.target_minutes, config.target_steps)
    loss_of = _compiled(cross_entropy(model), config)
    record = fit(model, draw, loss_of, _recipe(config), budget, work / "target", "target")
    save_model(model, out / "target")
    return record
