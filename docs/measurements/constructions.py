"""The trees of `drafter=aded`, best-first and by the paper's search: `python -m docs.measurements.constructions`.

Counts tokens on the bundled target and its prompts, greedy, one request at a time, with the production drafter and rule
and without an engine: no clock enters. One table for all prompts of a workload, empty at first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from actors.drafters.adjacency.aded import AdedDrafter
from actors.drafters.adjacency.config import AdedDrafterConfig, TreeConstruction
from actors.drafters.interface import ReadsTopTokens
from actors.protocol.messages import SamplingParams
from actors.verification.random_source import RandomSource
from actors.verification.top_tokens import TopTokensReader
from actors.verification.verifier import Verifier, VerifyInput, VerifyResult
from cluster import pocket
from cluster.io.console import Terminal
from cluster.io.prompts import read_prompts
from cluster.io.text import load_tokenizer, read_eos_token_ids
from cluster.tools.bench.rounds import CountedRound, complete
from docs.measurements import lines
from parallel.runtime.decoder_runner import DecoderRunner
from parallel.runtime.runner import open_model

WORKLOADS = {"completion": pocket.PROMPTS, "editing": pocket.PROMPTS.with_name("editing.jsonl")}
BUDGETS = (16, 64)
NUM_SLOTS = 4096


class TeachingVerifier(Verifier):
    """Its verdicts bring a drafter the `k` tokens that the target ranked highest."""

    def __init__(
        self,
        target: DecoderRunner,
        eos: tuple[int, ...],
        k: int,
        drafter: ReadsTopTokens | None,
        *,
        reads_prompts: bool = False,
    ) -> None:
        self._rows = TopTokensReader(k, reads_prompts=reads_prompts) if k else None
        super().__init__(target, "coupled", eos, top_tokens=self._rows)
        self._drafter = drafter

    def verify(
        self,
        inputs: Sequence[VerifyInput],
        logits: Tensor,
        make_random_source: Callable[[VerifyInput], RandomSource] | None = None,
    ) -> list[VerifyResult]:
        results = super().verify(inputs, logits, make_random_source)
        if self._rows is not None and self._drafter is not None and (top_tokens := self._rows.read()) is not None:
            self._drafter.read_top_tokens(top_tokens)
        return results


def rounds_of(
    target: DecoderRunner,
    config: AdedDrafterConfig,
    eos: tuple[int, ...],
    prompts: Sequence[tuple[int, ...]],
    num_tokens: int,
) -> list[CountedRound]:
    """All rounds of these prompts, one prompt after the other."""
    drafter, greedy = AdedDrafter(config), SamplingParams(temperature=0.0)
    verifier = TeachingVerifier(target, eos, config.target_top_k, drafter, reads_prompts=config.reads_prompts)
    rounds: list[CountedRound] = []
    with torch.inference_mode():
        for i, prompt in enumerate(prompts):
            rounds += complete(verifier, drafter, [prompt], greedy, config.num_draft_tokens, num_tokens, first_id=i)
    return rounds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = lines.parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=24, help="prompts of each workload, at most")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each completion")
    options = parser.parse_args(arguments)
    tokenizer, eos = load_tokenizer(pocket.TARGET), tuple(read_eos_token_ids(pocket.TARGET))
    target, terminal = open_model(str(pocket.TARGET), num_slots=NUM_SLOTS), Terminal()
    for name, file in WORKLOADS.items():
        prompts = [tuple(tokenizer.encode(prompt.text).ids) for prompt in read_prompts(file, options.prompts)]
        rows = []
        for learns, construction in product((True, False), TreeConstruction):
            row = [str(construction), str(learns).lower()]
            for num_nodes in BUDGETS:
                config = AdedDrafterConfig(num_draft_tokens=num_nodes, construction=construction, learns=learns)
                rounds = rounds_of(target, config, eos, prompts, options.tokens)
                row.append(f"{sum(one.num_tokens for one in rounds) / len(rounds):.2f}")
            rows.append(row)
        columns = ("construction", "learns", *(f"{num_nodes} nodes" for num_nodes in BUDGETS))
        terminal.table(f"Tokens per target pass, {name}", columns, rows)


if __name__ == "__main__":
    main()
