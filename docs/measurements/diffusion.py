"""Passes for each token of a target that fills masks: `python docs/measurements/diffusion.py [options]`.

`--target` is a checkpoint, such as `job=train job.recipe=sdar` makes one; it goes on with `--prompts` of the bundled
prompts. Without it the target has random weights of the layout of SDAR or Dream (`--layout`, `--layers`, `--width`), so
that its confidences say little, and random prompts. `--decoder` is `target.decoder`. Each of `--blocks` (the
checkpoint's own with `--target`), `--thresholds` and `--states` starts an engine, and writes `--tokens` tokens behind
each prompt, one request at a time (or `--batch` at once). One line for each: target passes a token, guessed states a
token (each is a copy of the block in a pass, whose rows cost time), tokens a second with these copies, the same over
the first of `--states`, whether the tokens are that one's, and the share of them before a text leaves that of threshold
0. Rates and ratios are medians of `--repeats` with their ranges; all of `--states` have their turn in each repeat, so
that a ratio has both its sides from about the same time. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.protocol.messages import SamplingParams
from cluster import pocket
from cluster.config import load_config
from cluster.engine import Engine
from cluster.io.prompts import read_prompts
from cluster.io.text import load_tokenizer

ARCHITECTURES = {"sdar": "SDARForCausalLM", "dream": "DreamModel"}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
COLUMNS = (
    "block",
    "threshold",
    "states a pass",
    "passes a token",
    "guesses a token",
    "tokens/s",
    "over the first",
    "tokens equal",
    "as with threshold 0",
)


def make_target(folder: Path, layout: str, block: int, layers: int, width: int) -> int:
    """A checkpoint with random weights and the bundled tokenizer; returns the size of its vocabulary."""
    import torch
    import transformers

    source = pocket.TARGET
    vocab_size = json.loads((source / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    torch.manual_seed(0)
    shape = dict[str, Any](
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    if layout == "sdar":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=width // 4))
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": [ARCHITECTURES[layout]], "block_size": block, "mask_token_id": vocab_size - 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in TOKENIZER:
        if (source / name).exists():
            shutil.copy(source / name, folder)
    return vocab_size


def bundled_prompts(folder: Path, count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(folder)
    return [tokenizer.encode(prompt.text).ids for prompt in read_prompts(pocket.PROMPTS, count)]


@dataclass(frozen=True)
class Measured:
    """What one engine made of the prompts."""

    tokens: list[list[int]]
    passes: float
    """Passes of the target for each token of a request."""
    guesses: float
    """Guessed states for each token."""
    rate: float
    """Tokens of all requests a second."""


def measure(
    folder: Path, prompts: list[list[int]], states: int, threshold: float, options: argparse.Namespace
) -> Measured:
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, temperature=options.temperature)
    words = ["target=hf", f"target.path={folder}", f"target.num_states={states}", "cluster=inprocess"]
    words += [f"target.unmask_threshold={threshold}"]
    words += [f"target.decoder={options.decoder}", "cluster.dashboard=false", f"scheduler.max_num_seqs={options.batch}"]
    with Engine(load_config(words)) as engine:
        engine.submit(prompts[0], params).result()
        before = engine.report().counters
        started, tokens = time.monotonic(), list[list[int]]()
        for first in range(0, len(prompts), options.batch):
            running = [engine.submit(prompt, params) for prompt in prompts[first : first + options.batch]]
            tokens += [completion.result().token_ids for completion in running]
        seconds, after = time.monotonic() - started, engine.report().counters
    count = sum(map(len, tokens))
    passes = after["num_rounds"] - before["num_rounds"]
    guesses = after["num_guessed_states"] - before["num_guessed_states"]
    waves = count / min(options.batch, options.prompts)
    return Measured(tokens, passes / waves, guesses / count, count / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=Path)
    parser.add_argument("--layout", choices=ARCHITECTURES, default="sdar")
    parser.add_argument("--decoder", choices=("static", "prefix", "dual"), default="static")
    parser.add_argument("--blocks", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--thresholds", nargs="+", type=float, default=[0.0])
    parser.add_argument("--states", nargs="+", type=int, default=[1, 2, 3, 4, 8])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    if options.target:
        config = json.loads((options.target / "config.json").read_text(encoding="utf-8"))
        compare(options.target, bundled_prompts(options.target, options.prompts), config["block_size"], options)
        return
    for block in options.blocks:
        with tempfile.TemporaryDirectory() as directory:
            folder, rng = Path(directory), random.Random(0)
            vocab_size = make_target(folder, options.layout, block, options.layers, options.width)
            prompts = [[rng.randrange(vocab_size - 1) for _ in range(16)] for _ in range(options.prompts)]
            compare(folder, prompts, block, options)


def compare(folder: Path, prompts: list[list[int]], block: int, options: argparse.Namespace) -> None:
    """Prints the rows of one checkpoint."""
    one_by_one: list[list[int]] | None = None
    for threshold in options.thresholds:
        repeats = [
            [measure(folder, prompts, states, threshold, options) for states in options.states]
            for _ in range(options.repeats)
        ]
        expected = repeats[0][0].tokens
        one_by_one = expected if one_by_one is None and not threshold else one_by_one
        for states, measured in zip(options.states, zip(*repeats, strict=True), strict=True):
            tokens = measured[0].tokens
            rates = median_of([one.rate for one in measured], ".0f")
            ratios = median_of([one.rate / turn[0].rate for one, turn in zip(measured, repeats, strict=True)], ".2f")
            equal = "yes" if all(one.tokens == expected for one in measured) else "NO"
            shared = f"{same_share(tokens, one_by_one):.0%}" if one_by_one else ""
            row = f"{block} | {threshold:g} | {states} | {measured[0].passes:.2f} | {measured[0].guesses:.2f}"
            print(f"| {row} | {rates} | {ratios} | {equal} | {shared} |", flush=True)


def median_of(values: list[float], digits: str) -> str:
    """The median, with the range behind it where there are several."""
    middle = format(statistics.median(values), digits)
    return f"{middle} ({min(values):{digits}} to {max(values):{digits}})" if len(values) > 1 else middle


def same_share(texts: list[list[int]], others: list[list[int]]) -> float:
    """The share of the tokens before the first that differs."""
    pairs = [list(zip(text, other, strict=True)) for text, other in zip(texts, others, strict=True)]
    same = sum(next((i for i, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs)
    return same / sum(map(len, pairs))


if __name__ == "__main__":
    main()
