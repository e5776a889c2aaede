"""A pocket encoder-decoder that corrects lines of Python, its SpecDec drafter, and what speculation gives it.

    python docs/measurements/correction.py target RUN --minutes 8      # trains RUN/target
    ./launch.sh job=train job.recipe=specdec target=hf target.path=RUN/target hydra.run.dir=RUN/specdec
    python docs/measurements/correction.py prompts RUN                 # RUN/prompts.jsonl: held-out corrupted lines
    ./launch.sh job=bench target=hf target.path=RUN/target job.prompts=RUN/prompts.jsonl ...   # docs/encoder_decoder.md

The task is that of `cluster/tools/training/pairs.py`. The target is trained here and not by `job=train`, since it is
only an example of one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import BartConfig, BartForConditionalGeneration

from cluster import pocket
from cluster.config.jobs import TrainConfig
from cluster.io.text import load_tokenizer
from cluster.tools.training.corpus import library_sources, load_corpus
from cluster.tools.training.pairs import library_pairs
from cluster.tools.training.specdec import TokenPairs, written_pairs
from cluster.tools.training.trainer import Recipe, StepOutcome, TrainingBudget, fit

START = 0
"""The pocket tokenizer's end of text, with which a text starts and ends."""
SEED = 7
"""Seed of the target's pairs, so that its lines differ from those of its drafter."""


def make_model(size: int, layers: int) -> BartForConditionalGeneration:
    torch.manual_seed(0)
    special = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id", "forced_eos_token_id"), START)
    stacks = {
        f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _stack(size, layers).items()
    }
    positions = {"max_position_embeddings": 128, "decoder_start_token_id": START, "dropout": 0.0}
    return BartForConditionalGeneration(BartConfig(vocab_size=4096, d_model=size, **special, **stacks, **positions))


def _stack(size: int, layers: int) -> dict[str, int]:
    return {"layers": layers, "attention_heads": size // 64, "ffn_dim": 4 * size}


def loss_of(model: BartForConditionalGeneration, pairs: TokenPairs) -> torch.Tensor:
    """Cross entropy of the texts, token by token, given their sources."""
    of_source = torch.arange(pairs.sources.shape[1]) < pairs.source_lens[:, None]
    logits = model(pairs.sources, of_source.long(), pairs.texts[:, :-1], use_cache=False).logits
    is_text = torch.arange(1, pairs.texts.shape[1]) < pairs.text_lens[:, None]
    labels = pairs.texts[:, 1:].masked_fill(~is_text, -100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_target(run: Path, minutes: float, size: int, layers: int, batch: int, count: int) -> None:
    tokenizer = load_tokenizer(pocket.TARGET)
    pairs = library_pairs(library_sources(load_corpus(0)), count, SEED)
    model = make_model(size, layers)
    tokens = written_pairs(model, tokenizer, pairs, TrainConfig(data="fixed"), print)
    held_out, training = tokens.part(torch.arange(256)), tokens.part(torch.arange(256, len(tokens)))

    def step_loss(step: int, _: float) -> StepOutcome:
        chosen = torch.randint(len(training), (batch,), generator=torch.Generator().manual_seed(step))
        part = training.part(chosen)
        return StepOutcome(loss_of(model, part), int(part.text_lens.sum()))

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        return {"loss": float(loss_of(model, held_out))}

    record = fit(model, step_loss, Recipe(3e-3, 2e-3), TrainingBudget(minutes), run / "work", evaluate=evaluate)
    model.save_pretrained(run / "target")
    shutil.copyfile(pocket.TARGET / "tokenizer.json", run / "target" / "tokenizer.json")
    print(record, evaluate(), f"{len(training)} pairs, {model.num_parameters():,} parameters")


def write_prompts(run: Path, count: int) -> None:
    """Corrupted lines of the modules that are held out of all training."""
    pairs = library_pairs(list(load_corpus(0).held_out), count, SEED)
    lines = [json.dumps({"prompt": pair.source, "category": "correction"}) for pair in pairs]
    (run / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["target", "prompts"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--size", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="texts of a step")
    parser.add_argument("--pairs", type=int, default=200_000, help="pairs to train on; tokenising them takes minutes")
    parser.add_argument("--count", type=int, default=48, help="prompts")
    given = parser.parse_args()
    given.run.mkdir(parents=True, exist_ok=True)
    if given.what == "target":
        torch.set_num_threads(1)
        train_target(given.run, given.minutes, given.size, given.layers, given.batch, given.pairs)
    else:
        write_prompts(given.run, given.count)


if __name__ == "__main__":
    main()
