"""A pocket encoder-decoder that corrects lines of Python, its SpecDec drafter, and what speculation gives it.

    python -m docs.measurements.correction target RUN --minutes 8      # trains RUN/target
    python -m docs.measurements.correction score RUN --count 256       # lines of held-out modules that it restores
    ./launch.sh job=train job.recipe=specdec target=hf target.path=RUN/target hydra.run.dir=RUN/specdec
    python -m docs.measurements.correction prompts RUN                 # RUN/prompts.jsonl: held-out corrupted lines
    ./launch.sh job=bench target=hf target.path=RUN/target job.prompts=RUN/prompts.jsonl ...   # docs/encoder_decoder.md

The task is that of `cluster/tools/training/pairs.py`. The target is trained here and not by `job=train`, since it is
only an example of one.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

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
from docs.measurements import lines

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


def train_target(given: argparse.Namespace) -> None:
    run, batch = given.run, given.batch
    tokenizer = load_tokenizer(pocket.TARGET)
    pairs = library_pairs(library_sources(load_corpus(0)), given.pairs, SEED)
    model = make_model(given.size, given.layers)
    tokens = written_pairs(model, tokenizer, pairs, TrainConfig(data="fixed"), print)
    held_out, training = tokens.part(torch.arange(256)), tokens.part(torch.arange(256, len(tokens)))
    by_length = training.text_lens.argsort()  # texts of a step are about equally long: half of its rows were padding

    def step_loss(step: int, _: float) -> StepOutcome:
        first = int(torch.randint(len(training) - batch, (), generator=torch.Generator().manual_seed(step)))
        part = training.part(by_length[first : first + batch])
        return StepOutcome(loss_of(model, part), int(part.text_lens.sum()))

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        return {"loss": float(loss_of(model, held_out))}

    recipe, budget = Recipe(3e-3, 2e-3, evaluation_minutes=10.0), TrainingBudget(given.minutes, given.steps)
    record = fit(model, step_loss, recipe, budget, run / "work", evaluate=evaluate, resume=given.resume)
    model.save_pretrained(run / "target")
    shutil.copyfile(pocket.TARGET / "tokenizer.json", run / "target" / "tokenizer.json")
    print(record, evaluate(), f"{len(training)} pairs, {model.num_parameters():,} parameters")


@torch.no_grad()
def score(run: Path, count: int) -> None:
    """Print how many corrupted lines of held-out modules the target's greedy texts restore."""
    tokenizer = load_tokenizer(run / "target")
    model: Any = BartForConditionalGeneration.from_pretrained(run / "target").eval()
    pairs = library_pairs(list(load_corpus(0).held_out), count, SEED)
    exact = right = labels = 0
    for pair in pairs:
        source = torch.tensor([tokenizer.encode(pair.source).ids])
        written = model.generate(source, max_new_tokens=96, num_beams=1, do_sample=False)[0].tolist()
        exact += tokenizer.decode([token for token in written if token != START]) == pair.text
        text = torch.tensor([[START, *tokenizer.encode(pair.text).ids, START]])
        right += int((model(source, decoder_input_ids=text[:, :-1]).logits.argmax(-1) == text[:, 1:]).sum())
        labels += text.shape[1] - 1
    print(f"{exact} of {len(pairs)} lines restored exactly; {right / labels:.1%} of tokens behind right text")


def write_prompts(run: Path, count: int) -> None:
    """Corrupted lines of the modules that are held out of all training."""
    pairs = library_pairs(list(load_corpus(0).held_out), count, SEED)
    lines.write(run / "prompts.jsonl", ({"prompt": pair.source, "category": "correction"} for pair in pairs))


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("what", choices=["target", "prompts", "score"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument(
        "--steps", type=int, default=0, help="the nearer of the two ends the training; 0: minutes alone"
    )
    parser.add_argument("--resume", action="store_true", help="go on with a training that was killed")
    parser.add_argument("--size", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="texts of a step")
    parser.add_argument("--pairs", type=int, default=200_000, help="pairs to train on")
    parser.add_argument("--count", type=int, default=48, help="prompts, and lines of a score")
    given = parser.parse_args()
    given.run.mkdir(parents=True, exist_ok=True)
    if given.what == "target":
        torch.set_num_threads(1)
        train_target(given)
    elif given.what == "score":
        score(given.run, given.count)
    else:
        write_prompts(given.run, given.count)


if __name__ == "__main__":
    main()
