"""What rows cost a mixture of experts, and whether lengths are chosen well there:
`python -m docs.measurements.mixtures passes` or `policy`.

`passes` makes a mixture with random weights, times its passes by their rows on this machine, and counts the distinct
experts of a layer that the rows use, beside E (1 - (1 - k / E)^rows), what independent rows are expected to use of E
experts, k each. `policy` puts such costs under the simulator: the best fixed length, and the decision cold and warm,
over plain decoding. Both print a Markdown table.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

import torch
from torch import Tensor

from actors.drafters.model.config import ModelDrafterConfig
from cluster.tools.simulation import Language, PassCost, Scenario, power_law, simulate
from docs.measurements import lines
from docs.measurements.decider import at_length, decided
from parallel.kv.pass_plan import Span
from parallel.runtime.runner import ModelRunner, open_model

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
VOCABULARY = 512
FIXED, LONGEST = (1, 2, 3, 4, 6, 8), 8
SHAPES = ((8, 2), (64, 8), (128, 8))
BATCHES, ACCEPTANCES = (1, 4, 16), (0.6, 0.8, 0.9)
BASE_MS, EXPERTS_MS, DRAFT_MS = 4.0, 26.0, 1.5
"""Of a pass what every row reads, and all experts of all layers; and a pass of the drafter."""


def distinct(num_experts: int, per_token: int, rows: int) -> float:
    """Experts that so many independent rows are expected to use."""
    return num_experts * (1 - (1 - per_token / num_experts) ** rows)


def make_mixture(path: Path, num_experts: int, per_token: int) -> None:
    """Random weights; larger ones of the embedding and the router, so that rows differ in their experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        moe_intermediate_size=512,
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        decoder_sparse_step=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    model.model.embed_tokens.weight.data.mul_(50)
    model.save_pretrained(path)


@torch.inference_mode()
def pass_s(model: ModelRunner, rows: int, draw: torch.Generator) -> float:
    """Seconds of a pass over so many rows of one random text."""
    model.open(0)
    tokens = torch.randint(VOCABULARY, (rows,), generator=draw).tolist()
    started = time.perf_counter()
    model.forward([Span(0, rows, num_logits=rows)], tokens)
    seconds = time.perf_counter() - started
    model.close(0)
    return seconds


class CountingRouter:
    """A router that notes how many distinct experts each pass uses."""

    def __init__(self, router: Callable[[Tensor], Tensor], per_token: int, found: list[int]) -> None:
        self._router, self._per_token, self._found = router, per_token, found

    def __call__(self, x: Tensor) -> Tensor:
        scores = self._router(x)
        self._found.append(len(scores.topk(self._per_token, -1).indices.unique()))
        return scores


def used_experts(model: ModelRunner, rows: int, repeats: int, draw: torch.Generator) -> float:
    """Mean number of distinct experts of a layer in such passes."""
    layers, found = [cast(Any, layer).mlp for layer in model.decoder.layers], list[int]()
    routers = [layer.router for layer in layers]
    for layer in layers:
        layer.router = CountingRouter(layer.router, layer.per_token, found)
    for _ in range(repeats):
        pass_s(model, rows, draw)
    for layer, router in zip(layers, routers, strict=True):
        layer.router = router
    return fmean(found)


def measured(num_experts: int, per_token: int, repeats: int) -> tuple[list[float], list[float]]:
    """Distinct experts and median milliseconds of passes, for each of `ROWS`, which take turns."""
    torch.set_num_threads(1)
    draw, times = torch.Generator().manual_seed(1), {rows: list[float]() for rows in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        make_mixture(Path(folder), num_experts, per_token)
        model = open_model(Path(folder), num_slots=2 * max(ROWS))
        experts = [used_experts(model, rows, 20, draw) for rows in ROWS]
        for _ in range(repeats):
            for rows in ROWS:
                times[rows].append(1e3 * pass_s(model, rows, draw))
    return experts, [median(times[rows]) for rows in ROWS]


def passes(num_experts: int, per_token: int, repeats: int) -> None:
    experts, times = measured(num_experts, per_token, repeats)
    expected = [distinct(num_experts, per_token, rows) for rows in ROWS]
    print(lines.head("rows", *ROWS))
    for name, values in (("experts expected", expected), ("experts used", experts), ("pass, ms", times)):
        print(lines.row(name, *(f"{value:.1f}" for value in values)))


def cost(num_experts: int, per_token: int) -> PassCost:
    """A staircase as it would be measured."""
    share = {rows: distinct(num_experts, per_token, rows) / num_experts for rows in (*ROWS, 96, 128, 256)}
    return PassCost.of_ms({rows: BASE_MS + EXPERTS_MS * part for rows, part in share.items()})


def scenario(costs: PassCost, batch: int, acceptance: float, seed: int, tokens: int) -> Scenario:
    return Scenario(
        "sync",
        costs,
        PassCost.flat(DRAFT_MS / 1e3),
        ModelDrafterConfig(num_draft_tokens=LONGEST),
        Language((acceptance,), power_law(0.8), seed=seed),
        num_requests=batch,
        max_tokens=tokens,
        target_link_s=5e-5,
        draft_link_s=5e-5,
    )


def speedups(case: Scenario) -> tuple[dict[int, float], float, float]:
    """Speed over plain decoding: fixed lengths, and the decision cold and warm."""
    plain = simulate(replace(case, pipeline="plain")).tokens_per_s
    fixed = {length: simulate(at_length(case, length)).tokens_per_s / plain for length in FIXED}
    cold, warm = (run.tokens_per_s / plain for run in decided(case))
    return fixed, cold, warm


def lengths(shapes: Sequence[tuple[int, int]], tokens: int, texts: int) -> None:
    print(
        lines.head("experts, of them each row's", "batch", "acceptance", "best fixed (tokens)", "decision, cold, warm")
    )
    for num_experts, per_token in shapes:
        for batch in BATCHES:
            for acceptance in ACCEPTANCES:
                of_batch = tokens if batch == 1 else tokens // 2
                cases = [
                    scenario(cost(num_experts, per_token), batch, acceptance, seed, of_batch) for seed in range(texts)
                ]
                runs = [speedups(case) for case in cases]
                fixed = {length: fmean(run[0][length] for run in runs) for length in FIXED}
                best = max(fixed, key=lambda length: fixed[length])
                cold, warm = fmean(run[1] for run in runs), fmean(run[2] for run in runs)
                cells = f"{num_experts}, {per_token}", batch, acceptance, f"{fixed[best]:.2f} ({best})"
                print(lines.row(*cells, f"{cold:.2f}, {warm:.2f}"), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("what", choices=("passes", "policy"))
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--per-token", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--texts", type=int, default=2)
    given = parser.parse_args(arguments)
    if given.what == "passes":
        passes(given.experts, given.per_token, given.repeats)
    else:
        lengths(SHAPES, given.tokens, given.texts)


if __name__ == "__main__":
    main()
