"""Measured quality of a finished pair, as numbers, a picture and a README. Trains nothing."""

from __future__ import annotations

import json
import math
import os
import platform
import textwrap
from pathlib import Path
from typing import Any

import torch

from cluster.config.jobs import TrainConfig
from cluster.tools.training.batches import spread_rows
from cluster.tools.training.corpus import HELD_OUT, TEST_MEGABYTES, Corpus
from cluster.tools.training.evaluation import acceptance_length, agreement_rate, greedy_matches, mean_loss, overlap
from cluster.tools.training.models import load_model
from cluster.tools.training.stages import RECIPE, SHORT_FRACTION
from cluster.tools.training.tokenizer import load_tokenizer, pack

MAX_DRAFT_TOKENS = 8
"""Acceptance length is reported for 1 to this many draft tokens per round."""
DRAFT_DEPTH = 5
"""Draft tokens per round of the acceptance length named first."""
START = 32
"""Tokens at the start of a continuation, measured apart because small models soon repeat themselves when greedy."""


def measure(config: TrainConfig, corpus: Corpus, out: Path) -> dict[str, Any]:
    """Measure the pair in `out` on held-out text, in float32 from the written weights.

    Returns:
        Losses in nats per token, perplexities, agreement, and acceptance lengths by draft tokens per round.

    Raises:
        FileNotFoundError: a model or the prompts are missing.
    """
    tokenizer = load_tokenizer(out / "target")
    target, drafter = (load_model(out / role, config.device) for role in ("target", "drafter"))
    rows = spread_rows(pack(tokenizer, corpus.held_out), config.sequence_length, config.held_out_tokens)
    lines = (out / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    matches = [greedy_matches(target, drafter, prompt, config.num_prompt_tokens) for prompt in prompts]
    losses = {"target": mean_loss(target, rows), "drafter": mean_loss(drafter, rows)}
    depths = range(1, MAX_DRAFT_TOKENS + 1)
    return {
        "held_out_loss": losses,
        "held_out_perplexity": {role: math.exp(loss) for role, loss in losses.items()},
        "held_out_tokens": rows.shape[0] * (rows.shape[1] - 1),
        "agreement_on_held_out_text": agreement_rate(target, drafter, rows),
        "agreement_on_continuations": sum(map(sum, matches)) / sum(map(len, matches)),
        "acceptance_rate_when_sampling": overlap(target, drafter, rows),
        "acceptance_length": {depth: acceptance_length(matches, depth) for depth in depths},
        "acceptance_length_at_start": acceptance_length([match[:START] for match in matches], DRAFT_DEPTH),
        "num_prompts": len(prompts),
        "parameters": {"target": target.num_parameters(), "drafter": drafter.num_parameters()},
    }


def describe_run(config: TrainConfig, corpus: Corpus, out: Path, work: Path) -> dict[str, Any]:
    """Return where the pair came from: corpus, seed, versions, and what each training run recorded in `work`."""
    tokenizer = load_tokenizer(out / "target")
    records = {}
    for role in ("target", "drafter"):
        path = work / role / "record.json"
        if path.exists():
            records[role] = json.loads(path.read_text())
    return {
        "seed": config.seed,
        "corpus_sha256": corpus.fingerprint(),
        "corpus_files": len(corpus.training),
        "corpus_megabytes": sum(len(source.text.encode()) for source in corpus.training) / 1e6,
        "corpus_tokens": len(pack(tokenizer, corpus.training)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "training": records,
    }


def draw_losses(work: Path, path: Path) -> None:
    """Draw the loss curves of both training runs into a PNG; runs without a log are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), dpi=80)
    captions = {"target": "cross entropy", "drafter": "KL from target"}
    for plot, (role, caption) in zip(axes, captions.items(), strict=True):
        log = work / role / "loss.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        plot.plot([line["tokens"] / 1e6 for line in lines], [line["loss"] for line in lines], linewidth=1)
        plot.set(title=role, xlabel="million tokens", ylabel=f"{caption}, nats/token", ylim=(0, None))
        plot.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def write_readme(config: TrainConfig, report: dict[str, Any], path: Path) -> None:
    """Write the README of a pair from the numbers of `measure` and `describe_run`."""
    path.write_text(_readme(config, report), encoding="utf-8")


def _row(role: str, parameters: int, record: dict[str, Any]) -> str:
    speed = record["tokens"] / record["seconds"]
    spent = f"{record['steps']} | {record['tokens'] / 1e6:.1f} M | {record['seconds'] / 60:.0f} min | {speed:.0f}"
    return f"| {role} | {parameters / 1e6:.1f} M | {spent} | {record['final_loss']:.3f} |"


def _readme(config: TrainConfig, report: dict[str, Any]) -> str:
    lengths = report["acceptance_length"]
    runs = "\n".join(_row(role, report["parameters"][role], record) for role, record in report["training"].items())
    quality = "\n".join(
        f"| {role} | {loss:.3f} | {report['held_out_perplexity'][role]:.1f} |"
        for role, loss in report["held_out_loss"].items()
    )
    depths = " | ".join(str(depth) for depth in lengths)
    values = " | ".join(f"{length:.2f}" for length in lengths.values())
    held_out = textwrap.fill(", ".join(f"`{name}`" for name in HELD_OUT), 116).replace("\n", "\n  ")
    return f"""# The pocket pair

A small code model (`target/`) and a smaller draft model distilled from it (`drafter/`), trained by `job=train` from
the sources of Python's standard library. Both are Llama checkpoints that `transformers` loads unchanged; they share
one byte-level BPE tokenizer of {config.vocab_size} entries. They exist so that the engine can be tried, tested and
measured without a download; they are too small to write useful programs.

Their context is 8192 tokens by configuration, but training used sequences of {config.sequence_length} at most: text
gets worse beyond that.

## Quality

Measured on modules that are in no training set ({report["held_out_tokens"]} tokens):

| model | held-out loss, nats/token | perplexity |
|---|---|---|
{quality}

Both models' most likely next tokens are equal at {report["agreement_on_held_out_text"]:.1%} of the positions of that
text, and at {report["agreement_on_continuations"]:.1%} of the tokens of the target's own greedy continuations. When
sampling at temperature 1, a draft token is accepted with probability {report["acceptance_rate_when_sampling"]:.2f} on
that text (mean of `sum(min(p, q))`).

**Acceptance length {lengths[DRAFT_DEPTH]:.2f}** at {DRAFT_DEPTH} draft tokens per round: tokens emitted per round
(accepted draft tokens plus the one the target adds), greedy decoding of {config.num_prompt_tokens} tokens or up to
the end of text, over the {report["num_prompts"]} prompts of `prompts.jsonl`, in float32. All lengths of a chain:

| draft tokens | {depths} |
|---|{"---|" * len(lengths)}
| acceptance length | {values} |

The target's continuation is generated once; the drafter's choice at each of its positions then gives the rounds
exactly, because a draft token only counts when all before it in its round were accepted. A target this small soon
repeats itself when it decodes greedily, and repetition is easy to draft: over the first {START} tokens of each
continuation the acceptance length at {DRAFT_DEPTH} draft tokens is {report["acceptance_length_at_start"]:.2f}.

## Recipe

| model | parameters | steps | tokens | wall time | tokens/s | final training loss |
|---|---|---|---|---|---|---|
{runs}

![loss curves](loss.png)

- Corpus: the `.py` files of the standard library of Python {report["python"]}, without installed packages,
  `encodings`, `pydoc_data` and files that are broken on purpose; of test files at most {TEST_MEGABYTES:g} MB,
  none above 100 kB. {report["corpus_files"]} files, {report["corpus_megabytes"]:.1f} MB,
  {report["corpus_tokens"] / 1e6:.2f} M tokens, each file preceded by `<|endoftext|>`. SHA-256 of the files read:
  `{report["corpus_sha256"]}`.
- Held out, with their tests:
  {held_out}.
- Seed {report["seed"]}, PyTorch {report["torch"]}, bfloat16 autocast over float32 weights, about
  {config.batch_tokens} tokens per step; the target in sequences of {config.sequence_length // 2} for the first
  {SHORT_FRACTION:.0%} of the schedule and of {config.sequence_length} after it.
- Muon at {RECIPE.matrix_learning_rate:g} for hidden matrices, AdamW at {RECIPE.other_learning_rate:g} for embeddings
  and norms; {RECIPE.warmup_steps} steps of warm-up, linear decay to 0 over the last {RECIPE.decay_fraction:.0%}.
- The target is trained by cross entropy, the drafter by distillation, KL(target || drafter) over the whole
  vocabulary, on sequences of {config.sequence_length} throughout: {config.distillation_tokens / 1e6:g} M tokens of
  training sources that are no tests, and the target's own greedy continuations, to {config.continuation_length} tokens,
  of {config.continuation_prompts} prompts cut from them.
- Written in bfloat16. Wall times are of device `{config.device}` on a machine of {report["cores"]} cores, and include
  the load of other programs; a budget of minutes makes the number of steps, and so the weights, depend on the machine.

`python -m cluster.launch job=train` repeats it into the run's folder. On Linux,
`OMP_WAIT_POLICY=passive GLIBC_TUNABLES=glibc.malloc.hugetlb=1` in the environment saves page faults.

## Licence

The standard library is distributed under the PSF License Agreement. `prompts.jsonl` quotes it, and so may the models.
Copyright (c) 2001 Python Software Foundation; All Rights Reserved. See https://docs.python.org/3/license.html;
beside the bundled pair the licence is in `LICENSE-PSF.md`.
"""
