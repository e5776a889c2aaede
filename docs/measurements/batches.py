"""Tokens a second with many requests at once: `python -m docs.measurements.batches OUT.jsonl --model DIR SETTING ...`.

A setting is overrides of the launch joined by commas, such as `pipeline=plain`, or `vllm`: the peer of `job.peers` in
the checkpoint's number type (`SPECDEC_VLLM_PYTHON` names its interpreter). Every start loads each setting in turn and
completes the same prompts of random tokens, greedily: all at once, first for one token each (the prompts), then for
`--tokens`. `--make` writes a Llama of 110 M random bfloat16 parameters to DIR first; `--table` prints medians.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from actors.drafters.config import NoDrafterConfig
from actors.options import PipelineConfig, TargetConfig
from actors.protocol.messages import SamplingParams
from cluster.config import load_config
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.tools.bench.peers.interface import PeerApart, PeerSetup
from cluster.tools.bench.peers.registry import open_peer
from cluster.tools.bench.plan import Setting
from cluster.tools.bench.tasks import BenchTask
from docs.measurements import lines

Result = tuple[float, list[list[int]]]
Complete = Callable[[Sequence[Sequence[int]], int], Result]
"""Seconds and tokens of all prompts, each completed by so many tokens."""

COMMON = ("cluster=inprocess", "cluster.dashboard=false", "target.dtype=bfloat16", "scheduler.max_num_seqs=64")


def make_model(directory: Path, seed: int = 0) -> None:
    """Twelve layers of a Llama, embeddings tied, and a tokenizer of 32,000 words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape: Any = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    config = LlamaConfig(**shape, vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=True)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    words: Any = Tokenizer(models.WordLevel({f"w{token}": token for token in range(32000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))


def measure(options: argparse.Namespace) -> None:
    """Every start in turn, so that what else the machine does meets all settings alike."""
    for start in range(options.starts):
        for setting in options.settings:
            for line in windows(options, setting):
                lines.append(options.file, {"setting": setting, "start": start} | line)


def windows(options: argparse.Namespace, setting: str) -> list[dict[str, object]]:
    """Figures of one start at every number of requests."""
    prompts = _prompts(max(options.batches), options.prompt_len)
    if setting == "vllm":
        return _windows_of_vllm(options, prompts)
    overrides = [*COMMON, f"target.path={options.model}", *options.overrides, *setting.split(",")]
    with Engine(load_config(overrides)) as engine:
        return [_figures(options, prompts[:batch], _engine_completes(engine)) for batch in options.batches]


def _windows_of_vllm(options: argparse.Namespace, prompts: list[list[int]]) -> list[dict[str, object]]:
    setup = PeerSetup(TargetConfig(path=str(options.model)), "bfloat16", "cpu", options.prompt_len + options.tokens)
    found = []
    for batch in options.batches:
        (peer,) = open_peer("vllm", setup).values()

        def complete(
            prompts: Sequence[Sequence[int]], num_tokens: int, batch: int = batch, peer: PeerApart = peer
        ) -> Result:
            sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            given = tuple(Prompt(str(index), token_ids=tuple(prompt)) for index, prompt in enumerate(prompts))
            setting = Setting(NoDrafterConfig(), PipelineConfig(), 0.0, batch, 0)
            run = peer.complete("vllm", BenchTask(setting, given, sampling, options.threads))
            return run.wall_s, [list(one.token_ids) for one in run.requests]

        found.append(_figures(options, prompts[:batch], complete))
        peer.close()
    return found


def _engine_completes(engine: Engine) -> Complete:
    def complete(prompts: Sequence[Sequence[int]], num_tokens: int) -> Result:
        started = time.monotonic()
        completions = engine.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        return time.monotonic() - started, [one.token_ids for one in completions]

    return complete


def _figures(options: argparse.Namespace, prompts: list[list[int]], complete: Complete) -> dict[str, object]:
    """Medians of the windows, and a digest of the tokens."""
    complete(prompts, 8)
    first, all_tokens, tokens = [], [], list[list[int]]()
    for _ in range(options.windows):
        first.append(complete(prompts, 1)[0])
        wall_s, tokens = complete(prompts, options.tokens)
        all_tokens.append(wall_s)
    prompts_s, wall_s, count = median(first), median(all_tokens), len(prompts)
    return {
        "requests": count,
        "tokens_per_s": count * options.tokens / wall_s,
        "prompts_s": prompts_s,
        "decode_per_s": count * (options.tokens - 1) / max(1e-9, wall_s - prompts_s),
        "digest": hashlib.sha256(repr(tokens).encode()).hexdigest()[:8],
    }


def _prompts(count: int, length: int) -> list[list[int]]:
    chooser = random.Random(7)
    return [[chooser.randrange(3, 32000) for _ in range(length)] for _ in range(count)]


def table(found: Sequence[lines.Line]) -> str:
    """Medians over the starts, and the range of the tokens a second."""
    rows = [lines.head("setting", "requests", "tokens/s", "prompts, s", "decoding, tokens/s")]
    for (setting, batch), own in lines.grouped(found, "setting", "requests").items():
        prompts_s, decode_per_s = (median([line[key] for line in own]) for key in ("prompts_s", "decode_per_s"))
        speeds = lines.spread([line["tokens_per_s"] for line in own])
        rows.append(lines.row(f"`{setting}`", batch, speeds, f"{prompts_s:.2f}", f"{decode_per_s:.0f}"))
    return "\n".join(rows)


def main() -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="of vLLM")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--overrides", action="append", default=[], help="of every setting of this engine")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args()
    if options.make:
        make_model(options.model)
    if options.table:
        print(table(lines.read(options.file)))
    else:
        measure(options)


if __name__ == "__main__":
    main()
