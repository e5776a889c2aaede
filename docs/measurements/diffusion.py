"""Passes for each token of a target that fills masks: `python -m docs.measurements.diffusion [options]`.

`--target` is a checkpoint, such as `job=train job.recipe=sdar` makes one; it goes on with `--prompts` of the bundled
prompts. Without it the target has random weights of the layout of SDAR or Dream (`--layout`, `--layers`, `--width`), so
that its confidences say little, and random prompts. `--decoder` is `target.decoder`. Each of `--blocks` (the
checkpoint's own with `--target`), `--thresholds` and `--states` starts an engine, and writes `--tokens` tokens behind
each prompt, one request at a time (or `--batch` at once). One line for each: target passes a token, guessed states a
token (each is a copy of the block in a pass, whose rows cost time), tokens a second with these copies, the same over
the first of `--states`, whether the tokens are that one's, and the share of them before a text leaves that of threshold
0. Rates and ratios are medians of `--repeats` with their ranges; the engines of all `--states` have their turn at each
prompt, so that a ratio has both its sides from about the same time. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.protocol.messages import SamplingParams
from cluster import pocket
from cluster.config import load_config
from cluster.engine import Engine
from cluster.io.prompts import read_prompts
from cluster.io.text import load_tokenizer
from cluster.tools.training.models import copy_tokenizer
from docs.measurements import lines

ARCHITECTURES = {"sdar": "SDARForCausalLM", "dream": "DreamModel"}
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
    copy_tokenizer(source, folder)
    return vocab_size


def bundled_prompts(folder: Path, count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(folder)
    return [tokenizer.encode(prompt.text).ids for prompt in read_prompts(pocket.PROMPTS, count)]


@dataclass
class Turns:
    """What one engine made of the prompts, each repeat by itself."""

    engine: Engine
    tokens: list[list[list[int]]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def begin_repeat(self) -> None:
        self.tokens.append([])
        self.seconds.append(0.0)

    def write(self, prompts: list[list[int]], params: SamplingParams) -> None:
        """Continue these prompts at once."""
        started = time.monotonic()
        running = [self.engine.submit(prompt, params) for prompt in prompts]
        self.tokens[-1] += [completion.result().token_ids for completion in running]
        self.seconds[-1] += time.monotonic() - started

    def rates(self) -> list[float]:
        """Tokens of all requests a second, in each repeat."""
        return [sum(map(len, texts)) / seconds for texts, seconds in zip(self.tokens, self.seconds, strict=True)]

    def counters(self) -> dict[str, Any]:
        return self.engine.report().counters


def engine_of(folder: Path, states: int, threshold: float, options: argparse.Namespace) -> Engine:
    words = ["target=hf", f"target.path={folder}", f"target.num_states={states}", "cluster=inprocess"]
    words += [f"target.unmask_threshold={threshold}"]
    words += [f"target.decoder={options.decoder}", "cluster.dashboard=false", f"scheduler.max_num_seqs={options.batch}"]
    return Engine(load_config(words))


def main() -> None:
    parser = lines.parser_of(__doc__)
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
    print(lines.head(*COLUMNS))
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
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, temperature=options.temperature)
    for threshold in options.thresholds:
        with ExitStack() as stack:
            turns = [
                Turns(stack.enter_context(engine_of(folder, states, threshold, options))) for states in options.states
            ]
            for one in turns:
                one.engine.submit(prompts[0], params).result()
            before = [one.counters() for one in turns]
            for _ in range(options.repeats):
                for one in turns:
                    one.begin_repeat()
                for first in range(0, len(prompts), options.batch):
                    for one in turns:
                        one.write(prompts[first : first + options.batch], params)
            after = [one.counters() for one in turns]
        expected = turns[0].tokens[0]
        one_by_one = expected if one_by_one is None and not threshold else one_by_one
        for states, one, then, now in zip(options.states, turns, before, after, strict=True):
            count = options.repeats * sum(map(len, expected))
            passes, guesses = (now[name] - then[name] for name in ("num_rounds", "num_guessed_states"))
            per_token = passes / count * min(options.batch, len(prompts))
            ratios = [rate / first for rate, first in zip(one.rates(), turns[0].rates(), strict=True)]
            speeds = lines.spread(one.rates()), lines.spread(ratios, ".2f")
            equal = "yes" if all(texts == expected for texts in one.tokens) else "NO"
            shared = f"{same_share(one.tokens[0], one_by_one):.0%}" if one_by_one else ""
            costs = f"{per_token:.2f}", f"{guesses / count:.2f}"
            print(lines.row(block, f"{threshold:g}", states, *costs, *speeds, equal, shared), flush=True)


def same_share(texts: list[list[int]], others: list[list[int]]) -> float:
    """The share of the tokens before the first that differs."""
    pairs = [list(zip(text, other, strict=True)) for text, other in zip(texts, others, strict=True)]
    same = sum(next((i for i, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs)
    return same / sum(map(len, pairs))


if __name__ == "__main__":
    main()
