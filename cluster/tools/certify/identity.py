"""Outputs of speculation and of plain decoding: same prompts, same settings, same engine.

Under the coupled rule sampled tokens must be equal, too; a ratio rule keeps their distribution only, so there the
greedy ones are compared and the sampled ones kept for the checks of distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from actors.options import VerifyRule
from actors.protocol.messages import SamplingParams
from actors.sampling.logits import is_greedy
from cluster.engine import Engine
from cluster.io.prompts import Prompt
from cluster.run_prompts import all_completed, serve_prompts


@dataclass(frozen=True, slots=True)
class OutputPair:
    """One prompt under one setting, as plain decoding and as speculation completed it."""

    prompt: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    plain: tuple[int, ...]
    speculative: tuple[int, ...]
    num_accepted_tokens: int

    @property
    def first_difference(self) -> int | None:
        """Index of the first generated token that differs, or is missing on one side."""
        pairs = enumerate(zip_longest(self.plain, self.speculative))
        return next((i for i, (plain, speculative) in pairs if plain != speculative), None)


def must_be_equal(rule: VerifyRule, sampling: SamplingParams) -> bool:
    """Whether the tokens themselves are promised, rather than their distribution."""
    return rule is VerifyRule.coupled or is_greedy(sampling)


def settings(base: SamplingParams, temperatures: Sequence[float], seeds: Sequence[int]) -> list[SamplingParams]:
    """Every temperature with every seed; greedy decoding draws nothing, so that one seed is enough."""
    chosen = []
    for temperature in dict.fromkeys(temperatures):
        tempered = replace(base, temperature=temperature)
        for seed in seeds[:1] if is_greedy(tempered) else dict.fromkeys(seeds):
            chosen.append(replace(tempered, seed=seed))
    return chosen


def complete(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    concurrency: int,
    on_finished: Callable[[], None],
) -> list[OutputPair]:
    """All prompts on both sides. Raises EngineError if a request failed, KeyboardInterrupt."""
    sides = []
    for speculate in (False, True):
        run = serve_prompts(
            engine,
            prompts,
            sampling,
            speculate=speculate,
            concurrency=concurrency,
            on_finished=lambda _served: on_finished(),
        )
        sides.append(all_completed(run))
    return [
        OutputPair(
            plain.index,
            tuple(engine.tokenizer.encode(plain.prompt.text).ids),
            sampling,
            plain.token_ids,
            speculative.token_ids,
            speculative.stats.num_accepted_tokens,
        )
        for plain, speculative in zip(*sides, strict=True)
    ]
