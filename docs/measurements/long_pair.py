"""A pocket pair for 32,768 positions: the bundled target goes on with texts that need far context.

    python -m docs.measurements.long_pair train RUN/4k --length 4096 --minutes 12
    python -m docs.measurements.long_pair train RUN/32k --start RUN/4k/target --length 4096 --reach 32768 --minutes 8
    python -m docs.measurements.long_pair loss RUN/4k/target RUN/32k/target
    python -m docs.measurements.long_pair prompts RUN/32k

`train` writes `target/` and beside it the bundled draft model with as many positions, which drafts with
`drafter.rows=streaming`. Rotations begin with a larger base, so that far positions differ from each other by no more
than near ones did. Rows are those of `far_texts.py`: of `--length` tokens, at positions up to `--reach`. `loss` prints
the loss of held-out tests behind the modules that they test, at growing distances, and behind others. `prompts` writes
the same texts for `job=bench`. The pair is an example; it is not made by `job=train`, which trains what drafts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, DynamicCache, LlamaForCausalLM

from cluster import pocket
from cluster.io.text import load_tokenizer
from cluster.tools.training.corpus import load_corpus
from cluster.tools.training.models import copy_tokenizer, save_rounded
from cluster.tools.training.trainer import Recipe, StepOutcome, TrainingBudget, fit
from docs.measurements import lines
from docs.measurements.far_texts import FarTexts, batch_of
from docs.measurements.long_contexts import copy_with_room
from parallel.training.precision import fast_passes

BASE = 500_000.0
"""Of the rotations; the bundled target has 10,000."""
TOKENS = 512
"""Of each held-out text that a loss is the mean of."""
BEGUN = 320
"""Of each held-out text in a prompt."""
CHUNK = 2048
"""Tokens of one pass where a long text is read."""


def load(path: Path, **fields: Any) -> LlamaForCausalLM:
    """In float32; `fields` replace those of its config.json."""
    config = AutoConfig.from_pretrained(path, **fields)
    return LlamaForCausalLM.from_pretrained(path, config=config, dtype=torch.float32, attn_implementation="sdpa")


def far_texts() -> FarTexts:
    return FarTexts(load_corpus(0), load_tokenizer(pocket.TARGET))


def logits_at(model: LlamaForCausalLM, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits [rows, length, V] of rows whose tokens stand at these positions, [rows, length]."""
    everything = torch.ones_like(positions)  # without it a jump of positions begins another text
    hidden = model.model(tokens, everything, positions, use_cache=False).last_hidden_state
    return F.linear(hidden, model.lm_head.weight).float()


def train(given: argparse.Namespace) -> None:
    reach = max(given.reach, given.length)
    rope = {"rope_type": "default", "rope_theta": BASE}
    model, texts = load(given.start, max_position_embeddings=reach, rope_parameters=rope), far_texts()
    seed = 10**6 * given.seed

    def step_loss(step: int, _: float) -> StepOutcome:
        seeds = range(seed + step * given.batch, seed + (step + 1) * given.batch)
        tokens, positions = batch_of([texts.row(one, given.length, reach) for one in seeds])
        logits = logits_at(model, tokens[:, :-1], positions).flatten(0, 1)
        return StepOutcome(F.cross_entropy(logits, tokens[:, 1:].flatten()), positions.numel())

    recipe, budget = Recipe(given.rate, given.rate / 2, warmup_steps=20), TrainingBudget(given.minutes, given.steps)
    record = fit(model, step_loss, recipe, budget, given.run / "work", resume=given.resume)
    save_rounded(model, given.run / "target")
    copy_tokenizer(pocket.TARGET, given.run / "target")
    copy_with_room(pocket.DRAFTER, given.run / "drafter", reach)
    print(record)


@torch.inference_mode()
def losses(
    model: LlamaForCausalLM, front: Sequence[int], between: Sequence[int], texts: Sequence[Sequence[int]]
) -> Iterator[float]:
    """The mean loss of the texts, in nats a token, each alone behind the front and what is between."""
    cache, context, fed = DynamicCache(), [*front, *between], 0
    while fed < len(context):
        model.model(torch.tensor([context[fed : fed + CHUNK]]), past_key_values=cache)
        fed += CHUNK
    for text in texts:
        logits = model(torch.tensor([text[:-1]]), past_key_values=cache).logits[0]
        cache.crop(1 - len(text))
        yield float(F.cross_entropy(logits.float(), torch.tensor(text[1:])))


def print_losses(paths: Sequence[Path], distances: Sequence[int]) -> None:
    fronts, between, texts = far_texts().held_out(TOKENS, max(distances))
    for path in paths:
        model = load(path).eval()
        with fast_passes("cpu"):
            print(f"{path}: alone {_mean(losses(model, (), (), texts)):.3f}", flush=True)
            for distance in distances:
                found = {name: _mean(losses(model, front, between[:distance], texts)) for name, front in fronts.items()}
                words = ", ".join(f"behind {name} modules {loss:.3f}" for name, loss in found.items())
                print(f"{path}: {distance:,} tokens between, {words}", flush=True)


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def write_prompts(run: Path, distances: Sequence[int]) -> None:
    """A file for each front and distance, with the beginnings of all held-out texts."""
    tokenizer = load_tokenizer(pocket.TARGET)
    fronts, between, texts = far_texts().held_out(BEGUN, max(distances))
    for name, front in fronts.items():
        for distance in distances:
            tokens = [[*front, *between[:distance], *text] for text in texts]
            prompts = [tokenizer.decode(one, skip_special_tokens=False) for one in tokens]
            lines.write(run / f"{name}-{distance}.jsonl", ({"prompt": one, "category": name} for one in prompts))


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("what", choices=["train", "loss", "prompts"])
    parser.add_argument("paths", type=Path, nargs="+", help="the run's folder; for a loss checkpoints")
    parser.add_argument("--start", type=Path, default=pocket.TARGET, help="the target to go on from")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--reach", type=int, default=0, help="positions; at least the length")
    parser.add_argument("--batch", type=int, default=1, help="rows of a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument(
        "--steps", type=int, default=0, help="the nearer of the two ends the training; 0: minutes alone"
    )
    parser.add_argument("--resume", action="store_true", help="go on with a training that was killed")
    parser.add_argument("--distances", type=int, nargs="+", default=[0, 4096, 12_288, 28_672])
    given = parser.parse_args()
    if given.what == "loss":
        print_losses(given.paths, given.distances)
        return
    given.run = given.paths[0]
    given.run.mkdir(parents=True, exist_ok=True)
    if given.what == "train":
        torch.set_num_threads(1)
        train(given)
    else:
        write_prompts(given.run, given.distances)


if __name__ == "__main__":
    main()
