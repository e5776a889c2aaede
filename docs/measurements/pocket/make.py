"""Makes the bundled pair, tokenizer, target and drafter: `python -m docs.measurements.pocket.make KEY=VALUE ...`.

Keys are the fields of `PairConfig`. Each stage reads what earlier ones left in the output folder, which receives
`target/`, `drafter/`, `prompts.jsonl`, `README.md`, `loss.png` and `report.json`: the bundled pair itself is only
replaced by a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from transformers import LlamaForCausalLM

from cluster.config.compose import typed_record
from cluster.io.console import Terminal, figure
from cluster.observability.report import write_json
from cluster.tools.training.corpus import Corpus, library_sources, load_corpus
from cluster.tools.training.models import CONTEXT, continue_text, drafter_config, grouped, initialised
from cluster.tools.training.prompts import choose_prompts
from cluster.tools.training.token_stream import pack, spread_rows
from cluster.tools.training.trainer import Resumable, StepLoss, StepOutcome, TrainingBudget, TrainingRecord, fit
from docs.measurements import lines
from docs.measurements.pocket import report
from docs.measurements.pocket.batches import DistillationSet, StreamBatches
from docs.measurements.pocket.config import RECIPE, SHORT_FRACTION, PairConfig
from docs.measurements.pocket.models import (
    load_model,
    load_tokenizer,
    logits_of,
    save_model,
    save_tokenizer,
    target_config,
    train_tokenizer,
)
from parallel.training.checkpoints import save_whole
from parallel.training.losses import forward_kl
from parallel.training.precision import fast_dtype

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Mean loss per token, in nats, of `[sequences, length]` tokens and the expected result at each of them."""

CONTINUATION_BATCH = 128
"""Prompts continued at once."""


@dataclass(frozen=True)
class Workplace:
    """What every stage needs."""

    config: PairConfig
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
    lines.write(place.out / "prompts.jsonl", map(asdict, prompts))


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
    target = load_model(place.out / "target", config.device, fast_dtype(config.device))
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
        return forward_kl(F.linear(hidden, head.to(hidden.dtype)), logits_of(student, tokens)).mean()

    return loss_of


def _compiled(loss_of: Loss, config: PairConfig) -> Loss:
    """Compile a loss, one static graph per batch shape."""
    return torch.compile(loss_of, dynamic=False) if config.compile else loss_of


def make_pair(config: PairConfig, folder: Path) -> dict[str, Any]:
    """Run the chosen stages in order; return the report of the `report` stage, or the records of the others.

    Writes into `config.out` or, by default, `folder`. Raises ValueError for an unknown stage or a setting out of range,
    FileNotFoundError for the missing output of an earlier stage that was not chosen.
    """
    config.check("pair")
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    out = Path(config.out) if config.out else folder
    work = Path(config.work) if config.work else folder / "work"
    out.mkdir(parents=True, exist_ok=True)
    terminal = Terminal()
    corpus = load_corpus(config.seed)
    place = Workplace(config, corpus, out, work)
    outcome: dict[str, Any] = {}
    if "tokenizer" in config.stages:
        with terminal.starting() as say:
            say("tokenizer: learning")
            make_tokenizer(place)
    if "target" in config.stages:
        outcome["target"] = asdict(make_target(place))
    if "continuations" in config.stages:
        with terminal.starting() as say:
            say("continuations: the target writes")
            outcome["continuation_tokens"] = make_continuations(place)
    if "drafter" in config.stages:
        outcome["drafter"] = asdict(make_drafter(place))
    if "report" in config.stages:
        with terminal.starting() as say:
            say("report: measuring the pair")
            outcome = {**report.describe_run(config, corpus, out, work), **report.measure(config, corpus, out)}
        write_json(out / "report.json", outcome)
        report.draw_losses(work, out / "loss.png")
        report.write_readme(config, outcome, out / "README.md")
        lengths = outcome["acceptance_length"]
        terminal.table(
            "acceptance length", ["draft tokens", *map(str, lengths)], [["", *map(figure, lengths.values())]]
        )
    terminal.line(f"written to {out}")
    return outcome


def main(words: Sequence[str]) -> None:
    """ValueError, one line, for a key that `PairConfig` does not have, and for its value."""
    keys = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}
    make_pair(typed_record(PairConfig(), keys, "pair"), Path("runs") / "pair")


if __name__ == "__main__":
    main(sys.argv[1:])
