"""Passes for each token of a target that fills masks: `python docs/measurements/diffusion.py [options]`.

The target has random weights of SDAR's layout (`--layers`, `--width`), so that its confidences say little: a trained
one guesses better. Each of `--blocks` and `--states` starts an engine, and writes `--tokens` tokens behind
each of `--prompts` random prompts, one request at a time (or `--batch` at once). One line for each: target passes a
token, tokens a second, and whether the tokens are those of one state a pass. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path

from actors.protocol.messages import SamplingParams
from cluster import pocket
from cluster.config import load_config
from cluster.engine import Engine

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def make_target(folder: Path, block: int, layers: int, width: int) -> int:
    """A checkpoint with random weights and the bundled tokenizer; returns the size of its vocabulary."""
    import torch
    import transformers

    source = pocket.TARGET
    vocab_size = json.loads((source / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    torch.manual_seed(0)
    shape = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    transformers.Qwen3ForCausalLM(shape).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["SDARForCausalLM"], "block_size": block, "mask_token_id": vocab_size - 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in TOKENIZER:
        if (source / name).exists():
            shutil.copy(source / name, folder)
    return vocab_size


def measure(folder: Path, states: int, vocab_size: int, options: argparse.Namespace) -> tuple[list[list[int]], str]:
    """The tokens, and the cells of a row."""
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size - 1) for _ in range(16)] for _ in range(options.prompts)]
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, temperature=options.temperature)
    words = ["target=hf", f"target.path={folder}", f"target.num_states={states}", "cluster=inprocess"]
    words += ["cluster.dashboard=false", f"scheduler.max_num_seqs={options.batch}"]
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
    waves = count / min(options.batch, options.prompts)
    return tokens, f"{passes / waves:.2f} | {count / seconds:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--states", nargs="+", type=int, default=[1, 2, 3, 4, 8])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    print("| block | states a pass | passes a token | tokens/s | tokens equal |\n|---|---|---|---|---|")
    for block in options.blocks:
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            vocab_size = make_target(folder, block, options.layers, options.width)
            expected: list[list[int]] | None = None
            for states in options.states:
                tokens, cells = measure(folder, states, vocab_size, options)
                expected = tokens if expected is None else expected
                print(f"| {block} | {states} | {cells} | {'yes' if tokens == expected else 'NO'} |", flush=True)


if __name__ == "__main__":
    main()
